"""The default writers, by detectron2's function."""

import os
from collections.abc import Sequence

from ...hooks import CommonMetricPrinter, EventWriter, JSONWriter, TensorboardXWriter

__all__ = ["default_writers"]


def default_writers(output_dir: str, max_iter: int | None = None) -> Sequence[EventWriter]:
    """Return writers for the console, ``metrics.json`` and TensorBoard.

    Args:
        output_dir: folder of the files.
        max_iter: the total number of iterations, for the ETA.
    """
    return [
        CommonMetricPrinter(max_iter),
        JSONWriter(os.path.join(output_dir, "metrics.json")),
        TensorboardXWriter(output_dir=output_dir),
    ]
