"""Curves as one HTML page that works offline: hover, zoom, smoothing, runs on and off."""

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import numpy as np

from ..config.errors import ConfigError
from ..config.files.atomic import replace_text
from .comparison import Comparison
from .reading import AXES, Curve, Run, check_output
from .selection import COLORS, charts_over

__all__ = ["write_page"]

_MAX_POINTS = 400_000
"""About how many points a page has. Longer curves are thinned: each part keeps its least and its largest value."""


def write_page(
    runs: Sequence[Run],
    path: str,
    metrics: Iterable[str] = (),
    *,
    axis: str = "iteration",
    smoothing: float = 0.0,
    log: bool = False,
    table: Comparison | None = None,
    title: str = "",
) -> None:
    """Write the metrics of runs as an HTML page without other files.

    Args:
        runs, metrics, axis, smoothing, log: as for :func:`~hookline.runs.draw_curves`; they can be changed on the page.
        path: the file.
        table: a table to show below the curves.
        title: default: the names of the runs.

    Raises:
        ConfigError: a pattern matches nothing, no run has this axis, or the file cannot be written.
    """
    check_output(path)
    charts = charts_over(runs, metrics, axis)
    title = title or (runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    number = sum(name in run.curves for run in runs for names in charts.values() for name in names)
    most = min(max(_MAX_POINTS // number, 2000), 20_000)
    shared: dict[bytes, int] = {}  # most metrics of a run have the same iterations
    data = {
        "runs": [_describe(run) for run in runs],
        "charts": [
            {
                "title": title,
                "series": [
                    {"run": i, "metric": name, "place": place, **_points(run.curves[name], most, shared)}
                    for i, run in enumerate(runs)
                    for place, name in enumerate(names)
                    if name in run.curves
                ],
            }
            for title, names in charts.items()
        ],
        "x": [np.frombuffer(one, dtype=np.int64).tolist() for one in shared],
        "axes": [name for name in AXES if any(run.has_axis(name) for run in runs)],
        "axis": axis,
        "smoothing": smoothing,
        "log": log,
        "colors": COLORS,
        "table": table and _table(table),
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    folder = resources.files(__package__)
    page = (folder / "page.html").read_text(encoding="utf-8")
    parts = {"title": html.escape(title), "footer": html.escape("; ".join(run.path for run in runs)), "data": text}
    parts["script"] = (folder / "page.js").read_text(encoding="utf-8")
    page = re.sub(r"\{(title|footer|data|script)\}", lambda found: parts[found[1]], page)
    try:
        replace_text(path, page)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _describe(run: Run) -> dict[str, Any]:
    clock = None
    if run.has_axis("time"):
        iterations = np.unique(np.concatenate([[-1], run.curves["time"].iterations, [run.last_iteration]]))
        clock = [iterations.tolist(), _rounded(run.along("time", iterations))]
    return {
        "name": run.name,
        "path": run.path,
        "epoch_length": run.epoch_length,
        "max_iter": run.max_iter,
        "clock": clock,
    }


def _points(curve: Curve, most: int, shared: dict[bytes, int]) -> dict[str, Any]:
    x, y = curve.iterations.astype(np.int64), curve.values
    if len(x) > most:
        parts = np.array_split(np.arange(len(x)), most // 2)
        low, high = np.nan_to_num(y, nan=np.inf), np.nan_to_num(y, nan=-np.inf)
        kept = {int(part[at]) for part in parts for at in (np.argmin(low[part]), np.argmax(high[part]))}
        indices = sorted({0, len(x) - 1, *kept})
        x, y = x[indices], y[indices]
    return {"x": shared.setdefault(x.tobytes(), len(shared)), "y": _rounded(y)}


def _rounded(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _table(table: Comparison) -> dict[str, Any]:
    rows = [
        [value if isinstance(value, str | int | float | None) else str(value) for value in row] for row in table.rows
    ]
    rows = [[None if isinstance(value, float) and not math.isfinite(value) else value for value in row] for row in rows]
    return {"columns": table.columns, "titles": table.titles(), "rows": rows, "keys": table.keys}
