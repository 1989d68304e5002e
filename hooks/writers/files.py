"""Metrics as files with a line for each row: JSON lines and CSV."""

import csv
import io
import json
import logging
import math
import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...config.files.atomic import check_regular, free_name, replace_file, sync_directory
from ...config.files.run_folder import claim
from ..event_storage import Row
from .base import WRITER_REGISTRY, RowWriter

__all__ = ["AppendFile", "CSVWriter", "JSONWriter", "back_up"]

logger = logging.getLogger(__name__)


class AppendFile:
    """A local file that data is appended to. The first write opens it, and creates it if it is missing.

    Args:
        path: the file. Existing content is kept.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1
        self._length = 0
        self._torn = False  # the file may end in part of a failed write

    def write(self, data: bytes | str) -> None:
        """Append ``data``, all or nothing: what a failed write has left is removed by the next one.

        Raises:
            OSError: the data could not be written.
            ConfigError: the path is not a regular file.
        """
        data = data.encode() if isinstance(data, str) else data
        self._open()
        self._remove_torn()
        self._torn = True
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]
        self._length += len(data)
        self._torn = False

    def _open(self) -> None:
        if self._descriptor >= 0:
            return
        check_regular(self.path)
        claim(self.path)
        folder = os.path.dirname(os.path.abspath(self.path))
        os.makedirs(folder, exist_ok=True)
        is_new = not os.path.exists(self.path)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._length = os.fstat(self._descriptor).st_size
        if is_new:
            sync_directory(folder)

    def _remove_torn(self) -> None:
        if self._torn:
            os.ftruncate(self._descriptor, self._length)
            self._torn = False

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def sync(self) -> None:
        """Sync the content to the disk."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Sync and close the file. The next write opens it again."""
        if self._descriptor >= 0:
            try:
                self._remove_torn()
                os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)
                self._descriptor, self._torn = -1, False


def back_up(path: str, copy: bytes | None = None) -> str:
    """Rename a file to the first free name of ``<path>.old``, ``<path>.old2`` and so on.

    Args:
        path: the file.
        copy: if given, the file stays, and a file with this content gets the name.

    Returns:
        The new name.
    """
    claim(name := free_name(path))
    if copy is None:
        os.rename(path, name)
    else:
        replace_file(name, lambda file: file.write(copy))
    return name


class _LineWriter(RowWriter):
    """A writer of a file with one line per row. A resume removes the rows from where the run continues.

    Args:
        path: the file. Rows are appended to existing content.
        window_size: see :class:`RowWriter`.

    Raises:
        ConfigError: the path is not a regular file.
    """

    _file_handle: Any  # detectron2's name. A subclass may open a file itself, and not call __init__

    def __init__(self, path: str, window_size: int = 20) -> None:
        super().__init__(window_size)
        check_regular(path)
        self.path = path
        self._file_handle = AppendFile(path)

    @abstractmethod
    def cut(self, data: bytes, end: int) -> tuple[bytes, int]:
        """Return the content without the rows from iteration ``end`` on and without an incomplete last line.

        Returns:
            The content, and the iteration of its last row; -1 if it has none.

        Raises:
            ValueError: the content was not written by this class.
        """

    def resume(self, start_iter: int) -> None:
        """Remove the rows from where this run continues; warn if rows before them are missing.

        A run that starts at 0 renames an existing file (``.old``, ``.old2`` and so on).
        """
        resumed, known = self._resumed, True
        super().resume(start_iter)
        if not self.path:  # a subclass opens its file itself
            return
        self._file_handle.close()
        check_regular(self.path)
        claim(self.path)
        data = self._content()
        if start_iter == 0:
            if data:
                back_up(self.path)
            return
        try:
            kept, last = self.cut(data, self._first)
        except ValueError as error:
            logger.warning("%s: %s", self.path, error)
            kept, last, known = b"", -1, False
        expected = self._last_write if resumed else -1
        if last < expected:
            missing = f"after iteration {last}" if last >= 0 else "of all iterations"
            logger.warning("%s: the rows %s up to %d are missing, and cannot be restored", self.path, missing, expected)
        if data and (last < expected or not known):
            logger.warning("A copy of the unchanged %s is %s", self.path, back_up(self.path, copy=data))
        if kept != data:
            logger.info("%s: removed the rows from iteration %d; this run writes them again", self.path, self._first)
            replace_file(self.path, lambda file: file.write(kept))

    def _content(self) -> bytes:
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            return file.read()
        return b""

    def sync(self) -> None:
        if self.path:
            self._file_handle.sync()

    def close(self) -> None:
        self._file_handle.close()


@WRITER_REGISTRY.register()
class JSONWriter(_LineWriter):
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
        lines = []
        for iteration, values in rows:
            finite = {name: value if math.isfinite(value) else None for name, value in sorted(values.items())}
            lines.append(json.dumps({"iteration": iteration, **finite}, allow_nan=False) + "\n")
        self._file_handle.write("".join(lines))

    def cut(self, data: bytes, end: int) -> tuple[bytes, int]:
        lines = [(line, _iteration(line)) for line in data.splitlines(keepends=True)]
        kept = [(line, int(iteration)) for line, iteration in lines if iteration < end]
        return b"".join(line for line, _ in kept), max((iteration for _, iteration in kept), default=-1)


def _iteration(line: bytes) -> float:
    """Return the iteration of a line; infinite for a line that is incomplete or not a row."""
    try:
        iteration = json.loads(line)["iteration"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return iteration if isinstance(iteration, int) else math.inf


@WRITER_REGISTRY.register()
class CSVWriter(_LineWriter):
    """One line for each iteration with metrics, one column for each metric; empty where there is no value.

    When a new metric appears, the file is atomically replaced by one with another column.

    Args:
        csv_file: path of the file. Rows are appended to existing content.
        window_size: see :class:`RowWriter`.
        output_dir: the run's folder, used if ``csv_file`` is not given: ``metrics.csv`` in it.
    """

    def __init__(self, csv_file: str | None = None, window_size: int = 20, output_dir: str = ".") -> None:
        super().__init__(os.path.join(output_dir, "metrics.csv") if csv_file is None else csv_file, window_size)
        self._columns: list[str] = []  # of the file; empty: not known

    def resume(self, start_iter: int) -> None:
        self._columns = []
        super().resume(start_iter)

    def cut(self, data: bytes, end: int) -> tuple[bytes, int]:
        columns, rows = _read_table(data)
        rows = [row for row in rows if row["iteration"].isdigit() and int(row["iteration"]) < end]
        if not rows:
            return b"", -1
        # Without a column that a killed run added later.
        return _table([name for name in columns if any(row[name] for row in rows)], rows), int(rows[-1]["iteration"])

    def write_rows(self, rows: Sequence[Row]) -> None:
        new = [{"iteration": str(iteration), **{n: repr(v) for n, v in values.items()}} for iteration, values in rows]
        added = sorted({name for row in new for name in row} - set(self._columns))
        if not added:
            self._file_handle.write(_table(self._columns, new, header=False))
            return
        columns, before = _read_table(self._content())
        columns = columns or ["iteration"]
        columns += [name for name in added if name not in columns]
        # An earlier attempt may have replaced the file and failed later: its rows must not appear twice.
        written = {row["iteration"] for row in new}
        text = _table(columns, [*(row for row in before if row["iteration"] not in written), *new])
        self.close()
        claim(self.path)
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        replace_file(self.path, lambda file: file.write(text))
        self._columns = columns


def _read_table(data: bytes) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and rows of a table, without an incomplete last line.

    Raises:
        ValueError: the first line is not a header.
    """
    text = data[: data.rfind(b"\n") + 1].decode(errors="replace")
    reader = csv.DictReader(io.StringIO(text, newline=""), restval="")
    try:
        rows = [{key: value for key, value in row.items() if key is not None} for row in reader]
    except csv.Error as error:
        raise ValueError(f"not a table of metrics: {error}") from error
    columns = list(reader.fieldnames or [])
    if columns and "iteration" not in columns:
        raise ValueError('not a table of metrics: its first line is not a header with the column "iteration"')
    return columns, rows


def _table(columns: Sequence[str], rows: Iterable[Mapping[str, str]], header: bool = True) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
