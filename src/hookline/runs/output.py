"""Where curves are written: beside the metrics of one run, or into the current folder."""

import os
from collections.abc import Iterable, Sequence

from ..config.errors import ConfigError
from ..config.files.run_folder import RECORDS, run_folder
from .figure import draw_curves
from .reading import Run

__all__ = ["claim_files", "write_curves"]


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
        runs, metrics, axis, smoothing, log: as for :func:`~hookline.runs.draw_curves`.
        out: a file that ends with the name of an image format. Empty: ``curves.png`` in the folder of the run, or in
            the current folder for several runs.

    Returns:
        The file.

    Raises:
        ConfigError: see :func:`~hookline.runs.draw_curves`.
    """
    if not 0 <= smoothing < 1:
        raise ConfigError(f"smoothing must be at least 0 and less than 1, not {smoothing}")
    file = out or (os.path.join(runs[0].path, "curves.png") if len(runs) == 1 else "curves.png")
    if not out and len(runs) == 1:
        claim_files(runs[0].path, ["curves.png"])
    draw_curves(runs, file, metrics, axis=axis, smoothing=smoothing, log=log)
    return file


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
