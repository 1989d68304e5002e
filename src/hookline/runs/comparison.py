"""A table of runs: where their configs differ, and their final and best metrics."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ..config.errors import ConfigError, printable, suggest
from .reading import Run, select_metrics

__all__ = ["Comparison", "compare_runs"]

_LOW = ("*loss*", "*error*", "*mse", "*mae", "*rmse", "*perplexity*", "*wer", "*cer", "*distance*", "*time", "fid")
_WIDTH = 40  # characters of a cell of the text table


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
        csv.writer(out, lineterminator="\n").writerows([self.columns, *self.rows])
        return out.getvalue()

    def markdown(self) -> str:
        """Return the table as Markdown."""
        marks = ["---" if i <= self.keys else "---:" for i in range(len(self.columns))]
        head, *rows = [[cell.replace("|", "\\|") for cell in row] for row in self._cells()]
        return "".join("| " + " | ".join(row) + " |\n" for row in (head, marks, *rows))

    def text(self) -> str:
        """Return the table in aligned columns."""
        head, *rows = [
            [cell if len(cell) <= _WIDTH else cell[: _WIDTH - 1] + "…" for cell in row] for row in self._cells()
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        out = ""
        for row in (head, ["-" * width for width in widths], *rows):
            cells = [f"{cell:{'<' if i <= self.keys else '>'}{widths[i]}}" for i, cell in enumerate(row)]
            out += "  ".join(cells).rstrip() + "\n"
        return out

    def _cells(self) -> list[list[str]]:
        """The table as text, under short titles: the last part of a key if no other key ends with it."""
        keys = self.columns[1 : 1 + self.keys]
        last = [key.rpartition(".")[2] for key in keys]
        titles = ["run", *(end if last.count(end) == 1 else key for key, end in zip(keys, last, strict=True))]
        titles += ["iterations"]
        for name in self.columns[len(titles) :: 3]:
            titles += [name, "best", "at"]
        return [titles, *([_cell(value) for value in row] for row in self.rows)]


def compare_runs(runs: Sequence[Run], metrics: Iterable[str] = (), sort: str = "") -> Comparison:
    """Compare runs.

    Args:
        runs: the runs.
        metrics: names or patterns. None: the metrics of evaluations (``<set>/<metric>``) and the loss.
        sort: a metric: the best run comes first, by its best value. Or a key of the config. Empty:
            ``CHECKPOINT.BEST.METRIC`` if all runs have the same one, else the given order.

    Raises:
        ConfigError: a pattern or ``sort`` matches nothing.
    """
    if metrics:
        names = select_metrics(runs, metrics)
    else:
        found = [name for name in select_metrics(runs) if not name.startswith(("train/", "ranks/", "lr/"))]
        names = [name for name in found if "/" in name]
        names += [name for name in ("loss", "total_loss") if name in found][:1]
    configs = [run.config for run in runs if run.config]
    keys = dict.fromkeys(key for config in configs for key in config if key != "OUTPUT_DIR")
    different = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    best = {str(run.config.get("CHECKPOINT.BEST.METRIC", "")) for run in runs}
    if not sort and len(best) == 1 and any(run.curves.keys() & best for run in runs):
        (sort,) = best
    columns = ["run", *different, "iterations"]
    for name in names:
        columns += [name, f"{name} best", f"{name} best at"]
    rows = []
    for run in sorted(runs, key=_order(runs, sort)) if sort else runs:
        iterations = run.last_iteration + 1
        row = [run.name, *map(run.config.get, different), min(iterations, run.max_iter or iterations)]
        for name in names:
            row += _final_and_best(run, name, _lower_is_better(runs, name))
        rows.append(row)
    return Comparison(columns, rows, len(different))


def _lower_is_better(runs: Sequence[Run], name: str) -> bool:
    """Whether a lower value of a metric is better, as the runs' configs or the metric's name say."""
    for run in runs:
        if run.config.get("CHECKPOINT.BEST.METRIC") == name:
            return run.config.get("CHECKPOINT.BEST.MODE") == "min"
    last = name.rpartition("/")[2].lower()
    return any(fnmatchcase(last, pattern) for pattern in _LOW)


def _final_and_best(run: Run, name: str, lower: bool) -> list[Any]:
    curve = run.curves.get(name)
    if curve is None or not np.isfinite(curve.values).any():
        return [None, None, None]
    best = int(np.nanargmin(curve.values) if lower else np.nanargmax(curve.values))
    last = float(curve.values[-1])
    return [last if math.isfinite(last) else None, float(curve.values[best]), int(curve.iterations[best])]


def _order(runs: Sequence[Run], sort: str) -> Callable[[Run], Any]:
    """Return the sort key of a run."""
    names = sorted({name for run in runs for name in run.curves})
    if sort in names:
        low = _lower_is_better(runs, sort)
        bests = {run.path: _final_and_best(run, sort, low)[1] for run in runs}
        return lambda run: math.inf if (best := bests[run.path]) is None else best if low else -best
    keys = sorted({key for run in runs for key in run.config})
    found = [key for key in keys if key == sort or key.endswith(f".{sort}")]
    if len(found) > 1:
        raise ConfigError(f"--sort: {sort!r} is one of {', '.join(found)}; give the full key")
    if not found:
        raise ConfigError(f"--sort: there is no metric or key {sort!r}{suggest(sort, [*names, *keys])}")
    values = {run.path: run.config.get(found[0]) for run in runs}
    numbers = all(type(value) in (int, float) for value in values.values())
    return lambda run: values[run.path] if numbers else str(values[run.path])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else printable(str(value))
