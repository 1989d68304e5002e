"""Curves as an image file."""

import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..config.atomic import replace_file
from ..config.errors import ConfigError
from .reading import WRITTEN_BY, Run, check_output, select_metrics

NO_MATPLOTLIB = "an image needs matplotlib: pip install 'hookline[plot]'"
_STYLES = ("-", "--", ":", "-.")
_LEGEND_ROWS = 14  # beside a chart
_DECADES = 1e5  # of learning rates below the largest: schedules end near 0


def draw_curve(axes: Any, x: np.ndarray, y: np.ndarray, smooth: bool = True, **style: Any) -> None:
    """Draw a curve. One of 50 points or more is drawn faintly, and its moving average over it.

    Args:
        axes: the axes of matplotlib.
        x: the iterations.
        y: the values. NaN leaves a gap.
        smooth: False: without the average.
        **style: color and so on, as for ``axes.plot``.
    """
    window = len(y) // 25
    if smooth and window > 1:
        axes.plot(x, y, **{**style, "alpha": 0.35, "linewidth": 0.8, "linestyle": "-", "label": None})
        finite, ones = np.isfinite(y), np.ones(window)
        total, number = np.convolve(np.where(finite, y, 0), ones, "same"), np.convolve(finite, ones, "same")
        y = np.where(finite, total / np.maximum(number, 1), np.nan)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.plot(x, y, marker="." if len(x) <= 25 else "", **style)


def write_curves(
    runs: Sequence[Run],
    out: str = "",
    metrics: Iterable[str] = (),
    *,
    log: bool = False,
) -> str:
    """Draw the metrics of runs into an image file: a chart for each metric, with a color for each run.

    Runs are in natural order of their names: 9 before 10. Metrics of a single run share a chart if their names have
    the same last part. Long curves are smoothed. Learning rates have a logarithmic scale.

    Args:
        runs: the runs.
        out: the file, whose ending names the format, such as ``.png``. Empty: ``curves.png`` in the folder of the run,
            or in the current folder for several runs.
        metrics: see :func:`~hookline.runs.select_metrics`.
        log: whether all values have a logarithmic scale.

    Returns:
        The file.

    Raises:
        ConfigError: matplotlib is missing, a pattern matches nothing, or ``out`` is a file of somebody else's (see
            :func:`~hookline.runs.reading.check_output`). Nothing is written.
    """
    several, runs = len(runs) > 1, sorted(runs, key=_natural_order)
    charts: dict[str, list[str]] = {}
    for name in select_metrics(runs, metrics):
        title = "lr" if _is_rate(name) else name.rpartition("/")[2]
        charts.setdefault(name if several else title, []).append(name)
    if not charts:
        raise ConfigError(f"{', '.join(run.path for run in runs)}: there are no metrics yet")
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise ConfigError(NO_MATPLOTLIB) from error
    path = out or os.path.join("" if several else runs[0].path, "curves.png")
    check_output(path)
    columns = 2 if len(charts) == 4 else min(len(charts), 3)
    lines = math.ceil(len(charts) / columns)
    legend_columns = math.ceil(len(runs) / (_LEGEND_ROWS * lines)) if several else 0
    figure = Figure(figsize=(5 * columns + 2 * legend_columns, 3.2 * lines), layout="constrained")
    end = max(run.curves[name].iterations[-1] for run in runs for name in run.curves) + 1
    for number, (title, names) in enumerate(charts.items(), 1):
        axes = figure.add_subplot(lines, columns, number, title=names[0] if len(names) == 1 else title)
        axes.set(xlabel="iteration", xlim=(-0.03 * end, 1.03 * end))
        rate = _is_rate(names[0])
        for place, (run, name) in enumerate((run, name) for run in runs for name in names):
            if curve := run.curves.get(name):
                draw_curve(axes, curve.iterations, curve.values, not rate, **_style(place), label=name)
        if (log or rate) and math.isfinite(axes.dataLim.minposy):  # some values are positive
            axes.set_yscale("log", nonpositive="mask")
            if rate:
                low, high = axes.get_ylim()
                axes.set_ylim(bottom=max(low, high / _DECADES))
        if len(names) > 1:
            axes.legend(fontsize=8)
    if several:
        lines_of_runs = [Line2D([], [], **_style(place)) for place in range(len(runs))]
        names = [run.name for run in runs]
        figure.legend(lines_of_runs, names, loc="outside right upper", ncols=legend_columns, frameon=False)
    kind = os.path.splitext(path)[1][1:].lower()
    metadata = {"Software" if kind == "png" else "Creator": WRITTEN_BY} if kind in ("png", "svg", "pdf") else None
    try:
        replace_file(path, lambda file: figure.savefig(file, format=kind, dpi=110, metadata=metadata))
    except (OSError, ValueError) as error:  # matplotlib does not know the ending
        raise ConfigError(f"{path} cannot be written (name a .png, .svg or .pdf): {error}") from error
    return path


def _is_rate(name: str) -> bool:
    return name == "lr" or name.startswith(("lr/", "lr "))


def _natural_order(run: Run) -> list[str | float]:
    """Numbers in a name, such as 10, 0.03 or 1e-4, are compared as numbers."""
    parts = re.split(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)", run.name)
    return [float(part) if place % 2 else part for place, part in enumerate(parts)]


def _style(place: int) -> dict[str, Any]:
    return {"color": f"C{place % 10}", "linestyle": _STYLES[place // 10 % len(_STYLES)]}
