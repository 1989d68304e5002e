"""Read the folder of a run to arrays: ``metrics.json`` and ``config.yaml``."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

from ..config.errors import ConfigError, printable, suggest, suggest_file
from ..config.node import CfgNode
from ..config.yaml_files import load_text

# The files that a run reads again when it is resumed.
_KEPT = re.compile(
    r"config\.yaml|metrics\.(json|csv)|last_checkpoint|(rolling_\d{7,}|model_(\d{7,}|final|exception|best\w*))\.pth"
)
_MEASURED = {  # those that hookline puts: a project's own "time_to_event" or "aux_mem" may be a result
    *("time", "data_time", "samples_per_s", "items_per_s", "flops_per_s"),
    *("mfu", "eval_time", "eval_samples_per_s", "rss_mem", "max_mem", "reserved_mem", "eta_seconds"),
    "slowest_rank",
}
# What the files of ``hookline plot`` and ``hookline export`` hold near their start or end.
WRITTEN_BY = "written by hookline"
_MARKS = (WRITTEN_BY.encode(), b'"hookline":"', b"hookline.json", b"\n\x08hookline\x12")
_SEARCHED = 1 << 24
_DEPTH = 3  # folders below the given one in which runs are looked for


def check_output(path: str, source: str = "") -> None:
    """Check the name of a file that a command writes.

    Args:
        path: the file.
        source: what the command reads; may be missing.

    Raises:
        ConfigError: the file is the source, a folder, a file that a run needs for its resume, or one that exists and
            that no command of hookline wrote.
    """
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder; give the name of a file")
    if os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source):
        raise ConfigError(f"{path}: is also the input; give the output another name")
    folder, name = os.path.split(os.path.abspath(path))
    marks = (os.path.join(folder, mark) for mark in ("config.yaml", "last_checkpoint"))
    if _KEPT.fullmatch(name) and any(map(os.path.isfile, marks)):
        raise ConfigError(f"{path}: is a file of the run in {folder}, which needs it; give the output another name")
    if os.path.lexists(path) and not _is_output(path):
        raise ConfigError(f"{path}: exists, and is no output of hookline; give another name, or remove it")


def _is_output(path: str) -> bool:
    """Whether a file is empty, or one that :func:`check_output` has allowed before: its metadata say so."""
    if not os.path.isfile(path):  # /dev/null
        return False
    with open(path, "rb") as file:
        start = file.read(_SEARCHED)
        file.seek(max(0, os.path.getsize(path) - _SEARCHED))
        end = file.read()
    return not start or any(mark in part for mark in _MARKS for part in (start, end))


@dataclass(frozen=True)
class Curve:
    """The values of a metric: ``iterations`` ascends, and ``values`` has NaN where the metric was not finite."""

    iterations: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Run:
    """What a run left in its folder.

    Attributes:
        path: the folder.
        name: a short name that differs from those of the runs read with it.
        curves: the metrics, by name.
        config: the values of ``config.yaml`` by full key; empty without the file.
    """

    path: str
    name: str
    curves: Mapping[str, Curve]
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def last_iteration(self) -> int:
        """The last iteration with a loss of training, or without one, with any metric; -1 if there is none."""
        losses = [self.curves[name] for name in ("total_loss", "loss") if name in self.curves]
        return max((int(curve.iterations[-1]) for curve in losses or self.curves.values()), default=-1)


def read_runs(paths: Iterable[str]) -> list[Run]:
    """Read runs.

    Args:
        paths: folders of runs, or folders that contain some (a sweep's), or ``metrics.json`` files. Earlier runs
            (``previous_001``) are read if they are named.

    Raises:
        ConfigError: a path does not exist, has no run, or a file of the run is corrupt.
    """
    folders: dict[str, str] = {}  # as given, by absolute path
    for path in paths:
        for folder in _folders(str(path)):
            folders.setdefault(os.path.abspath(folder), folder)
    if not folders:
        raise ConfigError("no run is given; name its folder before the options, as in: hookline plot RUN --log")
    common = os.path.commonpath(map(os.path.dirname, folders))
    return [read_run(folder, os.path.relpath(path, common)) for path, folder in folders.items()]


def read_run(path: str, name: str | None = None) -> Run:
    """Read one run.

    Args:
        path: its folder.
        name: default: the folder's name.

    Raises:
        ConfigError: see :func:`read_runs`.
    """
    try:
        curves = _read_metrics(os.path.join(path, "metrics.json"))
        config = _read_config(os.path.join(path, "config.yaml"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return Run(path, printable(name or os.path.basename(os.path.abspath(path))), curves, config)


def is_measured(name: str) -> bool:
    """Return whether a metric is a time, a speed or an amount of memory of hookline, which differs in each run."""
    return name in _MEASURED


def select_metrics(runs: Sequence[Run], patterns: Iterable[str] = ()) -> list[str]:
    """Return the names of metrics of the runs.

    Args:
        runs: the runs.
        patterns: names, or patterns such as ``"*/accuracy"``. None: all metrics except ``eta_seconds``, and except
            ``total_loss`` in runs whose only loss is ``loss``.

    Raises:
        ConfigError: a pattern matches no metric.
    """
    names = sorted({name for run in runs for name in run.curves})
    chosen: list[str] = []
    for pattern in patterns:
        found = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not found:
            there = ", ".join(names) or "none"
            raise ConfigError(f"no metric matches {pattern!r} (there are: {there}){suggest(pattern, names)}")
        chosen += [name for name in found if name not in chosen]
    left_out = {"eta_seconds"} | ({"total_loss"} if all(map(_has_one_loss, runs)) else set())
    return chosen or sorted((name for name in names if name not in left_out), key=_order)


def _has_one_loss(run: Run) -> bool:
    total, loss = run.curves.get("total_loss"), run.curves.get("loss")
    return total is None or (loss is not None and np.array_equal(total.values, loss.values, equal_nan=True))


def _order(name: str) -> tuple[bool, bool, str]:
    """Losses come first, measurements last, and names with the same last part are neighbours."""
    last = name.rpartition("/")[2]
    return is_measured(name), "loss" not in last, f"{last} {name}"


def _folders(path: str) -> list[str]:
    """Return the folders of the runs that a path names."""
    if os.path.basename(path) == "metrics.json":
        path = os.path.dirname(path) or "."
    if not os.path.exists(path):
        raise ConfigError(f"{path}: no such folder{suggest_file(path)}")
    if not os.path.isdir(path):
        raise ConfigError(f"{path}: is not a run; name its folder, or its metrics.json")
    found: list[str] = []
    for folder, below, files in os.walk(path):
        below.sort()
        if "metrics.json" in files:
            found.append(folder)
            below.clear()  # such as previous_001 of a run
        elif folder != path and os.path.relpath(folder, path).count(os.sep) >= _DEPTH - 1:
            below.clear()
    if not found:
        raise ConfigError(
            f"{path}: no run, since no metrics.json, is in it or below it; a run writes the file at its first "
            "LOG.PERIOD, if LOG.WRITERS has JSONWriter"
        )
    return found


def _read_metrics(path: str) -> dict[str, Curve]:
    """Return the curves of a ``metrics.json``. A last line without its end is ignored: a run is writing it.

    A file of detectron2 has an iteration twice after a resume: the later value counts.
    """
    points: dict[str, dict[int, float]] = {}
    if os.path.exists(path) and not os.path.isfile(path):  # opening a FIFO would wait
        raise ConfigError(f"{path}: is not a regular file")
    with open(path, "rb") as file:
        for line_number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                iteration = row.pop("iteration")
                if type(iteration) is not int or abs(iteration) >> 62:
                    raise ValueError(f"iteration is {iteration!r}")
                for name, value in row.items():
                    if value is None or type(value) in (int, float):
                        number = math.nan if value is None else float(value)
                        points.setdefault(printable(name), {})[iteration] = (
                            number if math.isfinite(number) else math.nan
                        )
            except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
                raise ConfigError(
                    f"{path}: line {line_number} is corrupt: {line[:60]!r} is not a row of metrics, such as "
                    '{"iteration": 19, "loss": 0.5}; remove the line'
                ) from None
    return {name: Curve(*map(np.array, zip(*sorted(rows.items()), strict=True))) for name, rows in points.items()}


def _read_config(path: str) -> dict[str, object]:
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8", errors="replace") as file:
        config = CfgNode(load_text(file.read(), path)).flatten()
    return {printable(key): value for key, value in config.items()}
