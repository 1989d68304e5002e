"""Metrics as JSON lines."""

import json
import math
import os
from collections.abc import Sequence

from ..storage.event_storage import Row
from .base import WRITER_REGISTRY
from .line_writer import LineWriter

__all__ = ["JSONWriter"]


@WRITER_REGISTRY.register()
class JSONWriter(LineWriter):
    """One JSON object per line, such as ``{"iteration": 19, "lr": 0.1, "total_loss": 1.2}``, iterations ascending.

    NaN and infinite values are written as null: JSON cannot represent them.

    Args:
        json_file: path of the file. Rows are appended to existing content.
        window_size: see :class:`RowWriter`.
        output_dir: the run's folder, used if ``json_file`` is not given: ``metrics.json`` in it.
    """

    def __init__(self, json_file: str | None = None, window_size: int = 20, output_dir: str = ".") -> None:
        super().__init__(os.path.join(output_dir, "metrics.json") if json_file is None else json_file, window_size)

    def write_rows(self, rows: Sequence[Row]) -> None:
        self.append("".join(map(_line, rows)).encode(), rows)

    def cut(self, data: bytes, end: int) -> bytes:
        return b"".join(line for line in data.splitlines(keepends=True) if _iteration(line) < end)

    def last_iteration(self, data: bytes) -> int:
        return int(max(map(_iteration, data.splitlines(keepends=True)), default=-1))


def _line(row: Row) -> str:
    iteration, values = row
    finite = {name: value if math.isfinite(value) else None for name, value in sorted(values.items())}
    return json.dumps({"iteration": iteration, **finite}, allow_nan=False) + "\n"


def _iteration(line: bytes) -> float:
    """Return the iteration of a line; infinite for a line that is incomplete or not a row."""
    try:
        iteration = json.loads(line)["iteration"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return iteration if isinstance(iteration, int) else math.inf
