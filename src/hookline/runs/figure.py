"""Curves as an image file."""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..config.errors import ConfigError
from ..config.files.atomic import replace_file
from .reading import Run
from .selection import COLORS, charts_over

__all__ = ["NO_MATPLOTLIB", "draw_curves", "smooth"]

NO_MATPLOTLIB = "an image needs matplotlib: pip install 'hookline[plot]'"

_STYLES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_UNITS = {"iteration": "iteration", "epoch": "epoch", "time": "training time (s)"}
_MAX_LEGEND = 12


def draw_curves(
    runs: Sequence[Run],
    path: str,
    metrics: Iterable[str] = (),
    *,
    axis: str = "iteration",
    smoothing: float = 0.0,
    log: bool = False,
) -> None:
    """Draw the metrics of runs into an image file.

    Args:
        runs: the runs. Each has a color; the metrics of one chart differ in the style of their lines.
        path: the file, whose ending names the format, such as ``.png``.
        metrics: see :func:`~hookline.runs.select_metrics`.
        axis: "iteration", "epoch" or "time".
        smoothing: weight of a running average, in [0, 1). The values themselves are then drawn pale.
        log: whether the values have a logarithmic scale.

    Raises:
        ConfigError: matplotlib is missing, a pattern matches nothing, or no run has this axis.
    """
    charts = charts_over(runs, metrics, axis)
    figure = _figure(len(charts))
    for place, (title, names) in zip(figure.axes, charts.items(), strict=False):
        for i, run in enumerate(runs):
            own = run.name if len(runs) > 1 else ""  # the legend names a run once
            for j, name in enumerate(names):
                if name not in run.curves or not run.has_axis(axis):
                    continue
                x, y = run.along(axis, run.curves[name].iterations), run.curves[name].values
                color = COLORS[(i if len(runs) > 1 else j) % len(COLORS)]
                style = _STYLES[j % len(_STYLES)] if len(runs) > 1 else "-"
                marker = "." if np.isfinite(y).sum() < 2 else ""
                if smoothing:
                    place.plot(x, y, color=color, alpha=0.25, linewidth=1)
                    y = smooth(y, smoothing)
                label = name if len(runs) == 1 else own or "_"
                place.plot(x, y, color=color, linestyle=style, marker=marker, linewidth=1.5, label=label)
                own = ""
        _finish(place, title, names, many=len(runs) > 1, axis=axis, log=log)
    low, high = zip(*(place.get_xlim() for place in figure.axes), strict=True)
    for place in figure.axes:
        place.set_xlim(min(low), max(high))
    _save(figure, path)


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Return the running average, without bias towards 0 at the start. NaN stays NaN and does not count."""
    average, total, out = 0.0, 0.0, np.full(len(values), np.nan)
    for i, value in enumerate(values.tolist()):
        if math.isfinite(value):
            average = weight * average + (1 - weight) * value
            total = weight * total + (1 - weight)
            out[i] = average / total
    return out


def _figure(charts: int) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(NO_MATPLOTLIB) from error
    columns = min(charts, 3 if charts != 4 else 2)
    lines = math.ceil(charts / columns)
    figure = Figure(figsize=(5 * columns, 3.2 * lines), layout="constrained")
    for place in figure.subplots(lines, columns, squeeze=False).flat[charts:]:
        place.remove()
    return figure


def _finish(place: Any, title: str, names: Sequence[str], *, many: bool, axis: str, log: bool) -> None:
    place.set_title(title, fontsize=11)
    place.set_xlabel(_UNITS[axis])
    place.grid(alpha=0.25)
    place.spines[["top", "right"]].set_visible(False)
    if log:
        place.set_yscale("log", nonpositive="mask")
    handles, labels = place.get_legend_handles_labels()
    if len(handles) > 1:
        place.legend(handles[:_MAX_LEGEND], labels[:_MAX_LEGEND], fontsize=8)
    if many and len(names) > 1:
        place.set_title(f"{title}  ({', '.join(names)})", fontsize=9)


def _save(figure: Any, path: str) -> None:
    kind = os.path.splitext(path)[1][1:]
    if kind.lower() not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"{path}: the file must end with .png, .svg or .pdf")
    try:
        replace_file(path, lambda file: figure.savefig(file, format=kind.lower(), dpi=110))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
