"""Read the folder of a run to arrays: ``metrics.json``, ``config.yaml``, and what the log says about epochs."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import escape, glob
from typing import Any

import numpy as np

from ..config.errors import ConfigError, suggest, suggest_file
from ..config.files.run_folder import RECORDS, run_folder
from ..config.yaml_files import load_text

__all__ = [
    "Curve",
    "Run",
    "check_output",
    "claim_files",
    "is_measured",
    "read_run",
    "read_runs",
    "select_metrics",
]

# The files that a run reads again when it is resumed.
_KEPT = re.compile(
    r"config\.yaml|metrics\.(json|csv)|last_checkpoint|(rolling_\d{7,}|model_(\d{7,}|final|exception|best\w*))\.pth"
)
_MEASURED = {  # those that hookline puts: a project's own "time_to_event" or "aux_mem" may be a result
    *("time", "data_time", "time_p95", "time_max", "samples_per_s", "items_per_s", "flops_per_s"),
    *("mfu", "eval_time", "eval_samples_per_s", "rss_mem", "max_mem", "reserved_mem", "eta_seconds"),
    "slowest_rank",
}
_DEPTH = 3  # folders below the given one in which runs are looked for


def check_output(path: str, source: str = "") -> None:
    """Check the name of a file that a command writes.

    Args:
        path: the file.
        source: what the command reads; may be missing.

    Raises:
        ConfigError: the file is the source, a folder, or a file that a run needs for its resume.
    """
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder; give the name of a file")
    if os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source):
        raise ConfigError(f"{path}: is also the input; give the output another name")
    folder, name = os.path.split(os.path.abspath(path))
    marks = (os.path.join(folder, mark) for mark in ("config.yaml", "last_checkpoint"))
    if _KEPT.fullmatch(name) and any(map(os.path.isfile, marks)):
        raise ConfigError(f"{path}: is a file of the run in {folder}, which needs it; give the output another name")


def claim_files(path: str, names: Iterable[str]) -> None:
    """Record files as those of a run, so that the next run in its folder moves them away with the others."""
    if os.path.isdir(os.path.join(path, RECORDS)):
        try:
            folder = run_folder(path)
            folder.join()
            for name in names:
                folder.claim(name)
        except OSError as error:
            raise ConfigError(f"{path} is not writable ({error}); name a file elsewhere by --out") from error


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
        epoch_length: iterations per epoch; None if the log does not say.
        max_iter: the length of the run in iterations; None if the log does not say.
    """

    path: str
    name: str
    curves: Mapping[str, Curve]
    config: Mapping[str, Any] = field(default_factory=dict)
    epoch_length: float | None = None
    max_iter: int | None = None

    @property
    def last_iteration(self) -> int:
        """The last iteration with a metric; -1 if there is none."""
        return max((int(curve.iterations[-1]) for curve in self.curves.values()), default=-1)

    def epochs(self, iterations: np.ndarray) -> np.ndarray:
        """Convert iterations to epochs.

        Raises:
            ConfigError: the log does not say how long an epoch is.
        """
        if self.epoch_length is None:
            raise ConfigError(
                f"{self.path} cannot be drawn by epoch: the length of an epoch is not in log.txt; draw it by iteration"
            )
        done = iterations + 1 if self.max_iter is None else np.minimum(iterations + 1, self.max_iter)
        return np.asarray(done / self.epoch_length)


def read_runs(paths: Iterable[str]) -> list[Run]:
    """Read runs.

    Args:
        paths: folders of runs, or folders that contain some (a sweep's), or ``metrics.json`` files. Earlier runs
            (``previous_001``) are read if they are named.

    Raises:
        ConfigError: a path does not exist, has no run, or a file of the run is damaged.
    """
    folders: list[str] = []
    for path in paths:
        known = {os.path.realpath(folder) for folder in folders}
        folders += [folder for folder in _folders(str(path)) if os.path.realpath(folder) not in known]
    if not folders:
        raise ConfigError(
            "no run is given; name its folder before the options, as in: hookline plot output/digits_convnet --log"
        )
    parents = [os.path.dirname(os.path.abspath(folder)) for folder in folders]
    common = os.path.commonpath(parents)
    return [read_run(folder, os.path.relpath(os.path.abspath(folder), common)) for folder in folders]


def read_run(path: str, name: str | None = None) -> Run:
    """Read one run.

    Args:
        path: its folder.
        name: default: the folder's name.

    Raises:
        ConfigError: see :func:`read_runs`.
    """
    (path,) = _folders(path, below=False)
    try:
        curves = _read_metrics(os.path.join(path, "metrics.json"))
        config = _read_config(os.path.join(path, "config.yaml"))
        length, max_iter = _lengths(os.path.join(path, "log.txt"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return Run(path, name or os.path.basename(os.path.abspath(path)), curves, config, length, max_iter)


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
    return chosen or sorted((name for name in names if name not in left_out), key=_place)


def _has_one_loss(run: Run) -> bool:
    total, loss = run.curves.get("total_loss"), run.curves.get("loss")
    return total is None or (loss is not None and np.array_equal(total.values, loss.values, equal_nan=True))


def _place(name: str) -> tuple[bool, bool, str]:
    """Losses come first, measurements last, and names with the same last part are neighbours."""
    last = name.rpartition("/")[2]
    return is_measured(name), "loss" not in last, f"{last} {name}"


def _folders(path: str, below: bool = True) -> list[str]:
    """Return the folders of the runs that a path names."""
    if os.path.isfile(path) and os.path.basename(path) == "metrics.json":
        return [os.path.dirname(path) or "."]
    if not os.path.exists(path):
        raise ConfigError(f"{path}: no such folder{suggest_file(path)}")
    if not os.path.isdir(path):
        raise ConfigError(f"{path}: is not a run; name its folder, or its metrics.json")
    path = path.rstrip(os.sep) or path
    if os.path.isfile(os.path.join(path, "metrics.json")):
        return [path]
    found: list[str] = []
    depths = range(1, _DEPTH + 1) if below else ()
    for file in sorted(file for depth in depths for file in glob(f"{escape(path)}/{'*/' * depth}metrics.json")):
        if not any(file.startswith(run + os.sep) for run in found):  # such as previous_001 of a run
            found.append(os.path.dirname(file))
    if not found:
        where = "in it or below it" if below else "in it"
        raise ConfigError(
            f"{path}: no run, since no metrics.json, is {where}; a run writes the file at its first LOG.PERIOD, if "
            "LOG.WRITERS has JSONWriter"
        )
    return found


def _read_metrics(path: str) -> dict[str, Curve]:
    """Return the curves of a ``metrics.json``. A last line without its end is ignored: a run is writing it.

    A file of detectron2 has an iteration twice after a resume: the later value counts.
    """
    points: dict[str, dict[int, float]] = {}
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
                        points.setdefault(name, {})[iteration] = number if math.isfinite(number) else math.nan
            except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
                raise ConfigError(
                    f"{path}: line {line_number} is damaged: {line[:60]!r} is not a row of metrics, such as "
                    '{"iteration": 19, "loss": 0.5}; remove the line'
                ) from None
    return {name: Curve(*map(np.array, zip(*sorted(rows.items()), strict=True))) for name, rows in points.items()}


def _read_config(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8", errors="replace") as file:
        return _flat(load_text(file.read(), path))


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a config by full key."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            values |= _flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def _lengths(path: str) -> tuple[float | None, int | None]:
    """Return iterations per epoch and in the run, from the line that a run logs when it starts or resumes."""
    if not os.path.isfile(path):
        return None, None
    with open(path, encoding="utf-8", errors="replace") as file:
        found = re.findall(r"Training for (\d+) iterations(?: \(([\d.e+]+) epochs\))?", file.read())
    if not found:
        return None, None
    iterations, epochs = int(found[-1][0]), float(found[-1][1] or 0)
    if not epochs:
        return None, iterations
    length = iterations / epochs  # the log has four digits of the epochs
    return (float(round(length)) if abs(length - round(length)) < length * 2e-3 else length), iterations
