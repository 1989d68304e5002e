"""Curves as an image file."""

import math
import os
from collections.abc import Iterable, Sequence

import numpy as np

from ..config.errors import ConfigError
from ..config.files.atomic import replace_file
from .reading import AXES, Run, claim_files, select_metrics

__all__ = ["NO_MATPLOTLIB", "draw_curves", "smooth", "write_curves"]

NO_MATPLOTLIB = "an image needs matplotlib: pip install 'hookline[plot]'"


def write_curves(
    runs: Sequence[Run],
    out: str = "",
    metrics: Iterable[str] = (),
    *,
    axis: str = "iteration",
    smoothing: float = 0.0,
    log: bool = False,
) -> str:
    """Write the metrics of runs as an image.

    Args:
        runs, metrics, axis, smoothing, log: as for :func:`draw_curves`.
        out: a file that ends with the name of an image format. Empty: ``curves.png`` in the folder of the run, or in
            the current folder for several runs.

    Returns:
        The file.

    Raises:
        ConfigError: see :func:`draw_curves`.
    """
    file = out or (os.path.join(runs[0].path, "curves.png") if len(runs) == 1 else "curves.png")
    if not out and len(runs) == 1:
        claim_files(runs[0].path, ["curves.png"])
    draw_curves(runs, file, metrics, axis=axis, smoothing=smoothing, log=log)
    return file


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
        runs: the runs.
        path: the file, whose ending names the format, such as ``.png``.
        metrics: see :func:`~hookline.runs.select_metrics`. Names with the same last part share a chart.
        axis: "iteration", "epoch" or "time" (seconds of training).
        smoothing: weight of a running average, in [0, 1). The values themselves are then drawn pale.
        log: whether the values have a logarithmic scale.

    Raises:
        ConfigError: matplotlib is missing, a pattern matches nothing, or no run has this axis.
    """
    if not 0 <= smoothing < 1:
        raise ConfigError(f"smoothing must be at least 0 and less than 1, not {smoothing}")
    charts = _charts(runs, metrics, axis)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(NO_MATPLOTLIB) from error
    columns = min(len(charts), 3)
    lines = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(5 * columns, 3.2 * lines), layout="constrained")
    kind = os.path.splitext(path)[1][1:].lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"{path}: the file must end with .png, .svg or .pdf")
    for number, (title, names) in enumerate(charts.items(), 1):
        place = figure.add_subplot(lines, columns, number, title=title, xlabel="time (s)" if axis == "time" else axis)
        place.grid(alpha=0.25)
        if log:
            place.set_yscale("log", nonpositive="mask")
        found = [(run, name) for name in names for run in runs if name in run.curves and run.has_axis(axis)]
        for run, name in found:
            x, y = run.along(axis, run.curves[name].iterations), run.curves[name].values
            label = name if len(runs) == 1 else f"{run.name} {name}" if len(names) > 1 else run.name
            (line,) = place.plot(x, smooth(y, smoothing), marker="." if len(x) == 1 else "", label=label)
            if smoothing:
                place.plot(x, y, color=line.get_color(), alpha=0.25)
        if len(found) > 1:
            place.legend(fontsize=8)
    try:
        replace_file(path, lambda file: figure.savefig(file, format=kind, dpi=110))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Return the running average, without bias towards 0 at the start. NaN stays NaN and does not count."""
    average, total, out = 0.0, 0.0, np.full(len(values), np.nan)
    for i, value in enumerate(values.tolist()):
        if math.isfinite(value):
            average = weight * average + (1 - weight) * value
            total = weight * total + (1 - weight)
            out[i] = average / total
    return out


def _charts(runs: Sequence[Run], patterns: Iterable[str], axis: str) -> dict[str, list[str]]:
    """Return the metrics of each chart, by its title: the last part of the names, such as ``loss``."""
    if axis not in AXES:
        raise ConfigError(f"x must be one of {', '.join(AXES)}, not {axis!r}")
    charts: dict[str, list[str]] = {}
    for name in select_metrics(runs, patterns):
        title = "lr" if name.startswith(("lr/", "lr ")) else name.rpartition("/")[2]
        charts.setdefault(title, []).append(name)
    if not charts:
        raise ConfigError(f"{', '.join(run.path for run in runs)}: there are no metrics yet")
    if not any(run.has_axis(axis) for run in runs):
        what = "the length of an epoch is not in log.txt" if axis == "epoch" else "there is no metric named time"
        raise ConfigError(f"{runs[0].path} cannot be drawn by {axis}: {what}; draw it by iteration")
    return {names[0] if len(names) == 1 else title: names for title, names in charts.items()}
