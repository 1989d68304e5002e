"""Curves as an image file."""

import math
import os
from collections.abc import Iterable, Sequence

from ..config.atomic import replace_file
from ..config.errors import ConfigError
from .reading import WRITTEN_BY, Run, check_output, select_metrics

NO_MATPLOTLIB = "an image needs matplotlib: pip install 'hookline[plot]'"


def write_curves(
    runs: Sequence[Run],
    out: str = "",
    metrics: Iterable[str] = (),
    *,
    log: bool = False,
) -> str:
    """Draw the metrics of runs into an image file. Names with the same last part share a chart.

    Args:
        runs: the runs.
        out: the file, whose ending names the format, such as ``.png``. Empty: ``curves.png`` in the folder of the run,
            or in the current folder for several runs.
        metrics: see :func:`~hookline.runs.select_metrics`.
        log: whether the values have a logarithmic scale.

    Returns:
        The file.

    Raises:
        ConfigError: matplotlib is missing, a pattern matches nothing, or ``out`` is a file of somebody else's (see
            :func:`~hookline.runs.reading.check_output`). Nothing is written.
    """
    charts: dict[str, list[str]] = {}
    for name in select_metrics(runs, metrics):
        title = "lr" if name.startswith(("lr/", "lr ")) else name.rpartition("/")[2]
        charts.setdefault(title, []).append(name)
    if not charts:
        raise ConfigError(f"{', '.join(run.path for run in runs)}: there are no metrics yet")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(NO_MATPLOTLIB) from error
    columns = min(len(charts), 3)
    lines = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(5 * columns, 3.2 * lines), layout="constrained")
    path = out or os.path.join(runs[0].path if len(runs) == 1 else "", "curves.png")
    check_output(path)
    kind = os.path.splitext(path)[1][1:].lower()
    for number, (title, names) in enumerate(charts.items(), 1):
        title = names[0] if len(names) == 1 else title
        axes = figure.add_subplot(lines, columns, number, title=title, xlabel="iteration")
        axes.grid(alpha=0.25)
        if log:
            axes.set_yscale("log", nonpositive="mask")
        found = [(run, name) for name in names for run in runs if name in run.curves]
        for run, name in found:
            x, y = run.curves[name].iterations, run.curves[name].values
            label = name if len(runs) == 1 else f"{run.name} {name}" if len(names) > 1 else run.name
            axes.plot(x, y, marker="." if len(x) == 1 else "", label=label)
        if len(found) > 1:
            axes.legend(fontsize=8)
    metadata = {"Software" if kind == "png" else "Creator": WRITTEN_BY} if kind in ("png", "svg", "pdf") else None
    try:
        replace_file(path, lambda file: figure.savefig(file, format=kind, dpi=110, metadata=metadata))
    except (OSError, ValueError) as error:  # matplotlib does not know the ending
        raise ConfigError(f"{path} cannot be written (name a .png, .svg or .pdf): {error}") from error
    return path
