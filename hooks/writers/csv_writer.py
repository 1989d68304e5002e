"""Metrics as a CSV table."""

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...config.files.atomic import replace_file
from ...config.files.run_folder import claim
from ..storage.event_storage import Row
from .base import WRITER_REGISTRY
from .line_writer import LineWriter

__all__ = ["CSVWriter"]


@WRITER_REGISTRY.register()
class CSVWriter(LineWriter):
    """One line for each iteration with metrics, one column for each metric; empty where there is no value.

    When a new metric appears, the file is atomically replaced by one with another column.

    Args:
        csv_file: path of the file. Rows are appended to existing content.
        window_size: see :class:`RowWriter`.
        output_dir: the run's folder, used if ``csv_file`` is not given: ``metrics.csv`` in it.
    """

    def __init__(self, csv_file: str | None = None, window_size: int = 20, output_dir: str = ".") -> None:
        super().__init__(os.path.join(output_dir, "metrics.csv") if csv_file is None else csv_file, window_size)
        self._columns: list[str] = []  # of the file or of the checkpoint; empty: take the file's

    def resume(self, start_iter: int) -> None:
        super().resume(start_iter)
        self._columns = _read(self._content())[0]

    def cut(self, data: bytes, end: int) -> bytes:
        columns, rows = _read(data)
        # A killed run may have added columns after the checkpoint.
        return _text(self._columns or columns, (row for row in rows if _iteration(row) < end)) if columns else b""

    def last_iteration(self, data: bytes) -> int:
        return int(max(map(_iteration, _read(data)[1]), default=-1))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "columns": self._columns}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._columns = list(state_dict.get("columns", ()))

    def write_rows(self, rows: Sequence[Row]) -> None:
        new = [{"iteration": str(iteration), **{n: repr(v) for n, v in values.items()}} for iteration, values in rows]
        added = sorted({name for row in new for name in row} - set(self._columns))
        if not added:
            self.append(_text(self._columns, new, header=False), rows)
            return
        columns, before = _read(self._content())
        columns = columns or ["iteration"]
        columns += [name for name in added if name not in columns]
        # An earlier attempt may have replaced the file and failed later: its rows must not appear twice.
        text = _text(columns, [*(row for row in before if _iteration(row) < rows[0][0]), *new])
        self.close()
        claim(self.path)
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        replace_file(self.path, lambda file: file.write(text))
        self._columns = columns


def _read(data: bytes) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and rows of a table, without an incomplete last line.

    Raises:
        ValueError: the first line is not a header.
    """
    text = data[: data.rfind(b"\n") + 1].decode(errors="replace")
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        columns = list(reader.fieldnames or [])
        rows = [{key: value or "" for key, value in row.items() if key is not None} for row in reader]
    except csv.Error as error:
        raise ValueError(f"not a table of metrics: {error}") from error
    if columns and "iteration" not in columns:
        raise ValueError('not a table of metrics: its first line is not a header with the column "iteration"')
    return columns, rows


def _text(columns: Sequence[str], rows: Iterable[Mapping[str, str]], header: bool = True) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _iteration(row: Mapping[str, str]) -> float:
    text = row["iteration"]
    return int(text) if text.isdigit() else float("inf")
