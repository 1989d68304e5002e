"""A table of runs: where their configs differ, and their final and best metrics."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ..config.errors import ConfigError, printable, suggest
from ..config.values import mode_of
from .reading import Run, select_metrics

_WIDTH = 40  # characters of a cell of the text table


@dataclass(frozen=True)
class Comparison:
    """A table with a row for each run, or for each group of runs.

    Attributes:
        columns: titles: "run", the full keys of the config that differ, "iterations", and for each metric its name
            (the final value), ``"<name> best"`` and ``"<name> best at"`` (an iteration). Of groups: "runs", their
            number; for each metric the mean of the final values, ``"<name> deviation"`` (of a sample, None for one
            run) and ``"<name> best"``, the best value of any of the runs.
        rows: the values, None where a run has none.
        keys: how many of the columns are keys.
    """

    columns: list[str]
    rows: list[list[object]]
    keys: int

    def csv(self) -> str:
        """Return the table as CSV, with full keys and all digits."""
        out = io.StringIO()
        rows = [[printable(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows]
        csv.writer(out, lineterminator="\n").writerows([self.columns, *rows])
        return out.getvalue()

    def text(self) -> str:
        """Return the table in aligned columns, under short titles."""
        titles = list(self.columns)
        last = [key.rpartition(".")[2] for key in titles[1 : self.keys + 1]]
        for i, title in enumerate(last, 1):
            titles[i] = title if last.count(title) == 1 else titles[i]
        for i in range(self.keys + 3, len(titles), 3):
            titles[i : i + 2] = [title.rpartition(" ")[2] for title in titles[i : i + 2]]
        cells = [titles, *([_cell(value) for value in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells.insert(1, ["-" * width for width in widths])
        lines = []
        for row in cells:
            aligned = [f"{cell:{'<' if i <= self.keys else '>'}{widths[i]}}" for i, cell in enumerate(row)]
            lines.append("  ".join(aligned).rstrip() + "\n")
        return "".join(lines)


def compare_runs(
    runs: Sequence[Run], metrics: Iterable[str] = (), sort: str = "", group: Sequence[str] = ()
) -> Comparison:
    """Compare runs, or groups of runs.

    Args:
        runs: the runs.
        metrics: names or patterns. None: the metrics of evaluations (``<set>/<metric>``) and the loss.
        sort: a metric: the best run comes first, by its best value, or the best group, by the mean of those. Empty:
            ``CHECKPOINT.BEST.METRIC`` if all runs have the same one, else the given order.
        group: keys of the config, or patterns such as ``"DATASETS.*"``: runs that differ only in these make a row,
            with mean and deviation, unless one of them has no finite final value. A run without a config is alone.

    Raises:
        ConfigError: a pattern, ``sort`` or ``group`` matches nothing.
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
    for pattern in group:
        if not any(fnmatchcase(key, pattern) for key in keys):
            raise ConfigError(f"--group: no run's config has the key {pattern!r}{suggest(pattern, keys)}")
    different = [key for key in different if not any(fnmatchcase(key, pattern) for pattern in group)]
    best = set(map(_best_metric, runs))
    if not sort and len(best) == 1 and any(run.curves.keys() & best for run in runs):
        (sort,) = best
    columns = ["runs" if group else "run", *different, "iterations"]
    for name in names:
        columns += [name, *(f"{name} {word}" for word in (("deviation", "best") if group else ("best", "best at")))]
    if sort:
        there = {name for run in runs for name in run.curves}
        if sort not in there:
            raise ConfigError(f"--sort: there is no metric {sort!r}{suggest(sort, there)}")
    groups: dict[object, list[Run]] = {}
    for run in runs:
        alike = repr([run.config.get(key) for key in different]) if group and run.config else id(run)
        groups.setdefault(alike, []).append(run)
    ordered = list(groups.values())
    if sort:
        ordered.sort(key=lambda members: np.mean([_final_and_best(run, sort, runs)[3] for run in members]))
    rows = []
    for members in ordered:
        first = members[0]
        row: list[object] = [len(members) if group else first.name, *map(first.config.get, different)]
        row.append(min(run.last_iteration for run in members) + 1)
        for name in names:
            values = [_final_and_best(run, name, runs) for run in members]
            row += _mean_and_best(values) if group else values[0][:3]
        rows.append(row)
    return Comparison(columns, rows, len(different))


def _final_and_best(run: Run, name: str, runs: Sequence[Run]) -> list[Any]:
    """Return the final and the best value of a metric, the iteration of the best, and its place: low is good."""
    curve = run.curves.get(name)
    if curve is None or not np.isfinite(curve.values).any():
        return [None, None, None, math.inf]
    modes = [str(one.config.get("CHECKPOINT.BEST.MODE", "auto")) for one in runs if _best_metric(one) == name]
    costs = curve.values if mode_of(name, modes[0] if modes else "auto") == "min" else -curve.values
    best = int(np.nanargmin(costs))
    last = float(curve.values[-1])
    final = last if math.isfinite(last) else None
    return [final, float(curve.values[best]), int(curve.iterations[best]), float(costs[best])]


def _mean_and_best(values: Sequence[Sequence[Any]]) -> list[Any]:
    """Return mean and deviation of the final values of some runs, and the best of their best values."""
    finals, best = [value[0] for value in values], min(values, key=lambda value: value[3])[1]
    if None in finals:
        return [None, None, best]
    return [float(np.mean(finals)), float(np.std(finals, ddof=1)) if len(finals) > 1 else None, best]


def _best_metric(run: Run) -> str:
    return str(run.config.get("CHECKPOINT.BEST.METRIC", ""))


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = f"{value:.5g}" if isinstance(value, float) else printable(str(value))
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
