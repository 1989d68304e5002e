"""Metrics as files with a line for each row: JSON lines and CSV."""

import csv
import io
import json
import logging
import math
import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ...config.atomic import check_regular, free_name, replace_file, sync_directory
from ..event_storage import Row
from .base import WRITER_REGISTRY, RowWriter

logger = logging.getLogger(__name__)


class AppendFile:
    """A local file that data is appended to. A write creates it if it is missing.

    Args:
        path: the file. Existing content is kept.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, data: bytes | str) -> None:
        """Append ``data``, all or nothing.

        Raises:
            OSError: the data could not be written.
            ConfigError: the path is not a regular file.
        """
        check_regular(self.path)
        folder = os.path.dirname(os.path.abspath(self.path))
        os.makedirs(folder, exist_ok=True)
        left = memoryview(data.encode() if isinstance(data, str) else data)
        with open(self.path, "ab", buffering=0) as file:
            length = os.fstat(file.fileno()).st_size
            if not length:
                sync_directory(folder)
            try:
                while left:
                    left = left[os.write(file.fileno(), left) :]
            except OSError:
                with suppress(OSError):  # raise the first error
                    file.truncate(length)
                raise

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def sync(self) -> None:
        """Sync the content to the disk."""
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        """Sync the content; the file is open only during a write."""
        self.sync()


def back_up(path: str, copy: bytes | None = None) -> str:
    """Rename a file to the first free name of ``<path>.old``, ``<path>.old2`` and so on.

    Args:
        path: the file.
        copy: if given, the file stays, and a file with this content gets the name.

    Returns:
        The new name.
    """
    name = free_name(path)
    if copy is None:
        os.rename(path, name)
    else:
        replace_file(name, lambda file: file.write(copy))
    return name


def _lines(path: str) -> list[bytes]:
    """Return the lines of a file, with their ends; none if it is missing."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        return file.readlines()
    return []


class _LineWriter(RowWriter):
    """A writer of a file with one line per row. A resume removes the rows from where the run continues.

    Args:
        path: the file. Rows are appended to existing content.
        window_size: see :class:`RowWriter`.
        output_dir: the folder of the file, if ``path`` is None. Default: the run's.

    Raises:
        ConfigError: the path is not a regular file.
    """

    _file_handle: AppendFile  # detectron2's name. A subclass may open a file itself, and not call __init__
    _name: str  # of the file in a folder
    _is_placed = True

    def __init__(self, path: str | None, window_size: int = 20, output_dir: str | None = None) -> None:
        super().__init__(window_size)
        self._is_placed = path is not None or output_dir is not None
        self.path = os.path.join(output_dir or ".", self._name) if path is None else path
        check_regular(self.path)
        self._file_handle = AppendFile(self.path)

    def use_folder(self, folder: str) -> None:
        if not self._is_placed:
            self.path = self._file_handle.path = os.path.join(folder, self._name)

    @abstractmethod
    def iteration_of(self, number: int, line: bytes) -> int:
        """Return the iteration of a line, -1 for a header.

        Raises:
            ValueError: it is no line of this class.
        """

    def resume(self, start_iter: int) -> None:
        """Remove the rows from where this run continues.

        A file that this class did not write, and any file if the run starts at 0, is renamed (``.old``, ``.old2``).
        """
        resumed = self._resumed
        super().resume(start_iter)
        if not self.path:  # a subclass opens its file itself
            return
        self._file_handle.close()
        check_regular(self.path)
        lines, last = _lines(self.path), -1
        if lines and start_iter == 0:
            back_up(self.path)
            return
        kept: list[bytes] = []
        for number, line in enumerate(lines):
            try:
                iteration = self.iteration_of(number, line)
            except (ValueError, KeyError, TypeError, IndexError, RecursionError):
                if number == len(lines) - 1 and (number or not line.endswith(b"\n")):  # it was being written
                    continue
                note = f"line {number + 1} is not a row of metrics"
                logger.warning("%s: %s. It is now %s", self.path, note, back_up(self.path))
                lines, kept, last = [], [], -1
                break
            if iteration < self._first:
                kept.append(line)
                last = max(last, iteration)
        if resumed and last < self._last_write:
            logger.warning("%s: rows up to iteration %d are missing", self.path, self._last_write)
        if len(kept) < len(lines):
            logger.info("%s: removed the rows from iteration %d; this run writes them again", self.path, self._first)
            replace_file(self.path, lambda file: file.writelines(kept))

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
        output_dir: the folder of ``metrics.json``, if ``json_file`` is not given. Default: the run's.
    """

    _name = "metrics.json"

    def __init__(self, json_file: str | None = None, window_size: int = 20, output_dir: str | None = None) -> None:
        super().__init__(json_file, window_size, output_dir)

    def write_rows(self, rows: Sequence[Row]) -> None:
        lines = []
        for iteration, values in rows:
            finite = {name: value if math.isfinite(value) else None for name, value in sorted(values.items())}
            lines.append(json.dumps({"iteration": iteration, **finite}) + "\n")
        self._file_handle.write("".join(lines))

    def iteration_of(self, number: int, line: bytes) -> int:
        iteration = json.loads(line)["iteration"]
        if not line.endswith(b"\n") or type(iteration) is not int:
            raise ValueError
        return iteration


@WRITER_REGISTRY.register()
class CSVWriter(_LineWriter):
    """One line for each iteration with metrics, one column for each metric; empty where there is no value.

    When a new metric appears, the file is atomically replaced by one with another column.

    Args:
        csv_file: path of the file. Rows are appended to existing content.
        window_size: see :class:`RowWriter`.
        output_dir: the folder of ``metrics.csv``, if ``csv_file`` is not given. Default: the run's.
    """

    _name = "metrics.csv"

    def __init__(self, csv_file: str | None = None, window_size: int = 20, output_dir: str | None = None) -> None:
        super().__init__(csv_file, window_size, output_dir)
        self._columns: list[str] = []  # of the file; empty: not known

    def resume(self, start_iter: int) -> None:
        self._columns = []
        super().resume(start_iter)

    def iteration_of(self, number: int, line: bytes) -> int:
        first = line.removesuffix(b"\n").rstrip(b"\r").split(b",")[0]
        if not line.endswith(b"\n") or (number == 0 and first != b"iteration"):
            raise ValueError
        return int(first) if number else -1

    def write_rows(self, rows: Sequence[Row]) -> None:
        added = {name for _, values in rows for name in values} - set(self._columns)
        if added:
            self._add_columns(sorted(added))
        lines = [[iteration, *(values.get(name, "") for name in self._columns[1:])] for iteration, values in rows]
        self._file_handle.write(_table(lines))

    def _add_columns(self, added: Sequence[str]) -> None:
        """Replace the file by one with these columns too."""
        header, *lines = _lines(self.path) or [b"iteration\r\n"]
        columns = next(csv.reader([header.decode()]))
        there = len(columns)
        columns += [name for name in added if name not in columns]
        if any("\n" in name or "\r" in name for name in columns):
            raise ValueError(f"{self.path}: the name of a metric has a line break: {columns}")
        self.close()
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        empty = b"," * (len(columns) - there)
        wider = [_table([columns]), *(line.rstrip(b"\r\n") + empty + b"\r\n" for line in lines)]
        replace_file(self.path, lambda file: file.writelines(wider))
        self._columns = columns


def _table(lines: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(lines)
    return text.getvalue().encode()
