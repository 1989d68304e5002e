"""Rows as lines of a file, which a resume checks against the checkpoint."""

import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...config.files.atomic import replace_file
from ...config.files.run_folder import claim
from ..storage.event_storage import Row
from .append_file import AppendFile, check_regular, keep_aside
from .base import RowWriter

__all__ = ["LineWriter"]

logger = logging.getLogger(__name__)


class LineWriter(RowWriter):
    """A writer of one line per row. A subclass defines :meth:`write_rows`, :meth:`cut` and :meth:`last_iteration`.

    Saves length and checksum of the rows that belong to a checkpoint. A resume compares the file with them, logs a
    warning that says what is missing, and then cuts the rows from where the run continues.

    Args:
        path: the file. Rows are appended to what it holds.
        window_size: see :class:`RowWriter`.

    Raises:
        ConfigError: the path is not a regular file.
    """

    def __init__(self, path: str, window_size: int = 20) -> None:
        super().__init__(window_size)
        check_regular(path)
        self.path = path
        self._file = AppendFile(path, checksum=True)
        self._written = -1  # the last iteration in the file
        self._expected: Mapping[str, Any] | None = None  # of the checkpoint, until the run has begun

    def cut(self, data: bytes, end: int) -> bytes:
        """The content of a file without the rows of iteration ``end`` and later, and without a torn last line.

        Raises:
            ValueError: the file is not one of this writer's.
        """
        raise NotImplementedError

    def last_iteration(self, data: bytes) -> int:
        """The last iteration in a content that :meth:`cut` returned; -1 if it holds none."""
        raise NotImplementedError

    def resume(self, start_iter: int) -> None:
        """Check the file against the checkpoint, and cut the rows from where this run continues, in one step.

        A run that starts from 0 keeps an existing file under another name (``.old``, ``.old2`` and so on).
        """
        super().resume(start_iter)
        self._file.close()
        check_regular(self.path)
        claim(self.path)
        expected, self._expected = self._expected, None
        data = self._content()
        if start_iter == 0:
            if data:
                keep_aside(self.path)
            return
        whole = self._check(data, expected)
        try:
            kept = self.cut(data, self._first)
        except ValueError as error:
            kept, whole = b"", False
            logger.warning("%s: %s", self.path, error)
        if data and not whole:
            logger.warning("A copy of %s as it was is %s", self.path, keep_aside(self.path, copy=data))
        if kept != data:
            logger.info("%s: removed the rows from iteration %d, where this run continues", self.path, self._first)
            replace_file(self.path, lambda file: file.write(kept))
        self._written = self._first - 1

    def _content(self) -> bytes:
        """What the file holds; empty if there is none."""
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            return file.read()
        return b""

    def _check(self, data: bytes, expected: Mapping[str, Any] | None) -> bool:
        """Whether a file holds the rows that belong to the checkpoint; if it does not, say what is missing."""
        if expected is None:  # saved without checksums, by hookline 0.1
            return True
        if expected["written"] < expected["last_write"]:
            logger.warning(
                "%s: the rows after iteration %d, up to iteration %d, could not be written when the checkpoint was "
                "saved; they may be missing",
                self.path,
                expected["written"],
                expected["last_write"],
            )
        try:
            rows = self.cut(data, expected["written"] + 1)
        except ValueError:
            rows = b""
        if (len(rows), zlib.crc32(rows)) == (expected["length"], expected["checksum"]):
            return True
        if not data:
            what = "is empty" if os.path.exists(self.path) else "is missing"
            missing = f"all rows up to iteration {expected['written']}"
        elif len(rows) < expected["length"]:
            what = "has lost rows"
            missing = f"{expected['length'] - len(rows)} of {expected['length']} bytes of rows up to iteration "
            missing += f"{expected['written']}, "
            last = self.last_iteration(rows)
            missing += "and no row is left" if last < 0 else f"and the last row left is of iteration {last}"
        else:
            what = "was changed since the checkpoint was saved"
            missing = f"the rows up to iteration {expected['written']} as they were"
        logger.warning(
            "%s %s: missing are %s. They cannot be restored; training is not affected and continues",
            self.path,
            what,
            missing,
        )
        return False

    def state_dict(self) -> dict[str, Any]:
        length, checksum = self._file.content()
        return {**super().state_dict(), "written": self._written, "length": length, "checksum": checksum}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._expected = state_dict if "checksum" in state_dict else None
        self._written = state_dict.get("written", self._last_write)

    def append(self, lines: bytes, rows: Sequence[Row]) -> None:
        """Append the lines of ``rows`` to the file: all of them, or none if that fails."""
        self._file_handle.write(lines)
        self._written = rows[-1][0]

    @property
    def _file_handle(self) -> AppendFile:
        """The file, under the name that it has in detectron2."""
        return self._file

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()
