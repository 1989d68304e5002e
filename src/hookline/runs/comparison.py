"""A table of runs: where their configs differ, and their final and best metrics."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ..config.defaults import get_cfg
from ..config.errors import ConfigError, printable, suggest
from ..config.yaml_files import load_text
from .reading import Run, flat
from .selection import select_metrics

__all__ = ["Comparison", "compare_runs", "lower_is_better"]

_LOW = ("*loss*", "*error*", "*mse", "*mae", "*rmse", "*perplexity*", "*wer", "*cer", "*distance*", "*time", "fid")
_WIDTH = 40  # characters of a cell of the text table
_NOT_COMPARED = ("OUTPUT_DIR",)
_MISSING = object()


@dataclass(frozen=True)
class Comparison:
    """A table with a row for each run.

    Attributes:
        columns: titles: "run", the full keys of the config that differ, "iterations", and for each metric its name
            (the final value), ``"<name> best"`` and ``"<name> best at"`` (an iteration).
        rows: the values, None where a run has none.
        keys: how many of the columns are keys.
    """

    columns: list[str]
    rows: list[list[Any]]
    keys: int

    def csv(self) -> str:
        """Return the table as CSV, with full keys and all digits."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([["" if value is None else value for value in row] for row in self.rows])
        return out.getvalue()

    def markdown(self) -> str:
        """Return the table as Markdown."""
        cells = [[_cell(value).replace("|", "\\|") for value in row] for row in self.rows]
        head = [title.replace("|", "\\|") for title in self.titles()]
        marks = ["---:" if self._is_number(i) else "---" for i in range(len(head))]
        return "\n".join("| " + " | ".join(row) + " |" for row in (head, marks, *cells)) + "\n"

    def text(self, width: int | None = None) -> str:
        """Return the table in aligned columns; with a column for each run if it would be wider than ``width``."""
        cells = [self.titles(), *([_short(_cell(value)) for value in row] for row in self.rows)]
        numbers = [self._is_number(i) for i in range(len(self.columns))]
        text = _aligned(cells, numbers)
        if width is not None and max(map(len, text.splitlines())) > width:
            text = _aligned([list(row) for row in zip(*cells, strict=True)], [False, *[True] * len(self.rows)])
        return text

    def titles(self) -> list[str]:
        """Return short titles: keys by their last parts where these are unique, and "best" and "at" after a metric."""
        keys = self.columns[1 : 1 + self.keys]
        short = {}
        for key in keys:
            parts = key.split(".")
            endings = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
            alone = (end for end in endings if sum(other == end or other.endswith(f".{end}") for other in keys) == 1)
            short[key] = next(alone, key)
        results = ["iterations"]
        for name in self.columns[len(keys) + 2 :: 3]:
            results += [name, "best", "at"]
        return ["run", *short.values(), *results]

    def _is_number(self, column: int) -> bool:
        return column > self.keys


def compare_runs(
    runs: Sequence[Run], metrics: Iterable[str] = (), sort: str = "", lower: bool | None = None
) -> Comparison:
    """Compare runs.

    Args:
        runs: the runs.
        metrics: names or patterns. None: the metrics of evaluations (``<set>/<metric>``) and the loss.
        sort: a metric. The best run comes first, by the metric's best value. A key of the config sorts by its value.
            Empty: ``CHECKPOINT.BEST.METRIC`` if all runs have the same one, else the given order.
        lower: whether lower values of the metrics are better. None: as ``CHECKPOINT.BEST.MODE`` says, otherwise by
            the name.

    Raises:
        ConfigError: a pattern or ``sort`` matches nothing.
    """
    names = select_metrics(runs, metrics) if metrics else _results(runs)
    keys = _different_keys(runs)
    columns = ["run", *keys, "iterations"]
    for name in names:
        columns += [name, f"{name} best", f"{name} best at"]
    rows = []
    for place in _order(runs, sort, list(keys), lower):
        run = runs[place]
        row = [run.name, *(values[place] for values in keys.values()), _iterations(run)]
        for name in names:
            row += _final_and_best(run, name, lower_is_better(runs, name) if lower is None else lower)
        rows.append(row)
    return Comparison(columns, rows, len(keys))


def lower_is_better(runs: Sequence[Run], name: str) -> bool:
    """Return whether a lower value of a metric is better, as the runs' configs or the metric's name say."""
    for run in runs:
        if run.config.get("CHECKPOINT.BEST.METRIC") == name:
            return run.config.get("CHECKPOINT.BEST.MODE") == "min"
    last = name.rpartition("/")[2].lower()
    return any(fnmatchcase(last, pattern) for pattern in _LOW)


def _results(runs: Sequence[Run]) -> list[str]:
    names = [name for name in select_metrics(runs) if not name.startswith(("train/", "ranks/", "lr/"))]
    results = [name for name in names if "/" in name]
    loss = [name for name in ("loss", "total_loss") if name in names][:1]
    return results + loss


def _different_keys(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The keys whose values are not the same in all runs that have a config, with the value of each run."""
    configs = [run.config for run in runs if run.config]
    keys = dict.fromkeys(key for config in configs for key in config if key not in _NOT_COMPARED)
    defaults: Mapping[str, Any] = {}
    if any(key not in config for config in configs for key in keys):  # such as a key of a later version
        defaults = flat(load_text(get_cfg().dump(), "the defaults"))
    different = {}
    for key in keys:
        values = [run.config.get(key, defaults.get(key, _MISSING)) if run.config else None for run in runs]
        own = {repr(value) for value, run in zip(values, runs, strict=True) if run.config}
        if len(own) > 1:
            different[key] = [None if value is _MISSING else value for value in values]
    return different


def _iterations(run: Run) -> int:
    last = run.last_iteration
    return min(last + 1, run.max_iter) if run.max_iter else last + 1


def _final_and_best(run: Run, name: str, lower: bool) -> list[Any]:
    curve = run.curves.get(name)
    if curve is None or not np.isfinite(curve.values).any():
        return [None, None, None]
    best = int(np.nanargmin(curve.values) if lower else np.nanargmax(curve.values))
    last = float(curve.values[-1])
    return [last if math.isfinite(last) else None, float(curve.values[best]), int(curve.iterations[best])]


def _order(runs: Sequence[Run], sort: str, keys: Sequence[str], lower: bool | None) -> list[int]:
    """Return the places of the runs, in the order of the table."""
    names = sorted({name for run in runs for name in run.curves})
    if not sort:
        best = {str(run.config.get("CHECKPOINT.BEST.METRIC", "")) for run in runs}
        sort = best.pop()
        if best or sort not in names:
            return list(range(len(runs)))
    if sort in names:
        low = lower_is_better(runs, sort) if lower is None else lower
        found = [_final_and_best(run, sort, low)[1] for run in runs]
        marks = [math.inf if value is None else (value if low else -value) for value in found]
        return sorted(range(len(runs)), key=marks.__getitem__)
    matching = [key for key in {key for run in runs for key in run.config} if key == sort or key.endswith(f".{sort}")]
    if len(matching) > 1:
        raise ConfigError(f"--sort: {sort!r} is one of {', '.join(sorted(matching))}; give the full key")
    if not matching:
        raise ConfigError(f"--sort: there is no metric or key {sort!r}{suggest(sort, [*names, *keys])}")
    values = [run.config.get(matching[0]) for run in runs]
    numbers = all(type(value) in (int, float) for value in values)
    marked: list[tuple[Any, int]] = [(value if numbers else str(value), i) for i, value in enumerate(values)]
    return [i for _, i in sorted(marked)]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.5g}"
    return printable(str(value))


def _aligned(cells: Sequence[Sequence[str]], numbers: Sequence[bool]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in (cells[0], ["-" * width for width in widths], *cells[1:]):
        parts = zip(row, widths, numbers, strict=True)
        lines.append("  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in parts))
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
