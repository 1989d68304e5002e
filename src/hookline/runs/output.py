"""Where curves are written: beside the metrics of one run, or into the current folder."""

import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from ..config.errors import ConfigError
from ..config.files.run_folder import RECORDS, run_folder
from .comparison import compare_runs
from .figure import NO_MATPLOTLIB, draw_curves
from .page import write_page
from .reading import Run

__all__ = ["claim_files", "write_curves"]

_PAGES = (".html", ".htm")


def write_curves(
    runs: Sequence[Run],
    out: str = "",
    metrics: Iterable[str] = (),
    *,
    axis: str = "iteration",
    smoothing: float = 0.0,
    log: bool = False,
) -> list[str]:
    """Write the metrics of runs as an image and as a page.

    Args:
        runs, metrics, axis, smoothing, log: as for :func:`~hookline.runs.draw_curves`.
        out: a file that ends with ``.html``, or with the name of an image format: only this one is written. Without
            an ending: ``<out>.png`` and ``<out>.html``. Empty: ``curves`` in the folder of the run, or in the current
            folder for several runs.

    Returns:
        The files. The image is left out without matplotlib, unless ``out`` names it.

    Raises:
        ConfigError: see :func:`~hookline.runs.draw_curves`.
    """
    metrics = list(metrics)
    if not 0 <= smoothing < 1:
        raise ConfigError(f"smoothing must be at least 0 and less than 1, not {smoothing}")
    ending = os.path.splitext(out)[1]
    stem = out or (os.path.join(runs[0].path, "curves") if len(runs) == 1 else "curves")
    files = [out] if ending else [f"{stem}.html", f"{stem}.png"]
    if not ending and find_spec("matplotlib") is None:
        files.pop()
    if not out and len(runs) == 1:
        claim_files(runs[0].path, map(os.path.basename, files))
    for file in files:
        if file.lower().endswith(_PAGES):
            table = compare_runs(runs, metrics) if len(runs) > 1 else None
            write_page(runs, file, metrics, axis=axis, smoothing=smoothing, log=log, table=table)
        else:
            draw_curves(runs, file, metrics, axis=axis, smoothing=smoothing, log=log)
    return files


def missing_image(out: str, files: Iterable[str]) -> str:
    """Return why :func:`write_curves` wrote no image; empty if it did, or none was asked for."""
    return "" if os.path.splitext(out)[1] or any(file.endswith(".png") for file in files) else NO_MATPLOTLIB


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
