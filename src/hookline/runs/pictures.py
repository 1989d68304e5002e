"""The picture of a confusion matrix, drawn by matplotlib."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..config.errors import ConfigError
from ..config.files.atomic import replace_file
from ..config.files.run_folder import claim
from .figure import NO_MATPLOTLIB

__all__ = ["check_matplotlib", "draw_matrix", "pixels", "save_picture"]

_MOST_LABELS = 40
_MOST_NUMBERS = 25


def check_matplotlib(who: str) -> None:
    """Raise ConfigError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401 (tried)
    except ImportError as error:
        raise ConfigError(f"{who}: {NO_MATPLOTLIB}") from error


def draw_matrix(matrix: np.ndarray, names: Sequence[str], title: str = "") -> Any:
    """Return a figure of a confusion matrix. The color of a cell is its share of the class in its row.

    Args:
        matrix: (C, C), ``matrix[target, prediction]`` is a number of samples.
        names: the classes.
        title: above the picture.
    """
    from matplotlib.figure import Figure

    count = len(matrix)
    size = min(max(3.5, 1.6 + 0.42 * count), 12)
    figure = Figure(figsize=(size + 0.8, size), layout="constrained")
    place = figure.subplots()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    image = place.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="share of the class", shrink=0.8)
    place.set(xlabel="prediction", ylabel="target", title=title)
    if count <= _MOST_LABELS:
        turned = max(map(len, names), default=0) > 3
        place.set_xticks(range(count), names, rotation=90 if turned else 0)
        place.set_yticks(range(count), names)
    if count <= _MOST_NUMBERS:
        for (row, column), number in np.ndenumerate(matrix):
            if number:
                color = "white" if shares[row, column] > 0.5 else "black"
                place.text(column, row, f"{int(number)}", ha="center", va="center", color=color, fontsize=8)
    return figure


def pixels(figure: Any) -> np.ndarray:
    """Return a figure as (3, H, W), for ``storage.put_image``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3].transpose(2, 0, 1))


def save_picture(figure: Any, path: str) -> None:
    """Write a figure as PNG, as a file of the run whose folder it is in."""
    claim(path)
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=110))
