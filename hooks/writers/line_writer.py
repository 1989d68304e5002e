"""Files with one line per row, which a resume compares with the checkpoint."""

import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from ...config.files.atomic import replace_file
from ...config.files.run_folder import claim
from ..storage.event_storage import Row
from .append_file import AppendFile, back_up, check_regular
from .base import RowWriter

__all__ = ["LineWriter"]

logger = logging.getLogger(__name__)


class LineWriter(RowWriter):
    """A writer of one line per row. A subclass defines :meth:`write_rows`, :meth:`cut` and :meth:`last_iteration`.

    A checkpoint holds the length and checksum of its rows. A resume compares the file with them, logs a warning if
    rows are missing, and removes the rows from where the run continues.

    Args:
        path: the file. Rows are appended to existing content.
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
        self._expected: Mapping[str, Any] | None = None  # loaded from the checkpoint, until training begins

    def cut(self, data: bytes, end: int) -> bytes:
        """Return the content without the rows from iteration ``end`` on and without an incomplete last line.

        Raises:
            ValueError: the content was not written by this class.
        """
        raise NotImplementedError

    def last_iteration(self, data: bytes) -> int:
        """Return the last iteration in a content that :meth:`cut` returned; -1 if it is empty."""
        raise NotImplementedError

    def resume(self, start_iter: int) -> None:
        """Compare the file with the checkpoint, and remove the rows from where this run continues.

        A run that starts at 0 renames an existing file (``.old``, ``.old2`` and so on).
        """
        super().resume(start_iter)
        if self._opens_itself():
            return
        self._file.close()
        check_regular(self.path)
        claim(self.path)
        expected, self._expected = self._expected, None
        data = self._content()
        if start_iter == 0:
            if data:
                back_up(self.path)
            return
        whole = self._check(data, expected)
        try:
            kept = self.cut(data, self._first)
        except ValueError as error:
            kept, whole = b"", False
            logger.warning("%s: %s", self.path, error)
        if data and not whole:
            logger.warning("A copy of the unchanged %s is %s", self.path, back_up(self.path, copy=data))
        if kept != data:
            logger.info("%s: removed the rows from iteration %d; this run writes them again", self.path, self._first)
            replace_file(self.path, lambda file: file.write(kept))
        self._written = self._first - 1

    def check_file(self) -> None:
        if not self._opens_itself():
            self._check(self._content(), self._expected)

    def _content(self) -> bytes:
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            return file.read()
        return b""

    def _check(self, data: bytes, expected: Mapping[str, Any] | None) -> bool:
        """Return whether the rows of the checkpoint are in the file; if not, log what is missing."""
        if expected is None:  # hookline 0.1 saved no checksums
            return True
        if expected["written"] < expected["last_write"]:
            logger.warning(
                "%s: the rows of iterations %d to %d were not yet written when the checkpoint was saved, and may be "
                "missing",
                self.path,
                expected["written"] + 1,
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
            missing += "and no row is left" if last < 0 else f"and the last row left is iteration {last}"
        else:
            what = "was changed since the checkpoint was saved"
            missing = f"the rows up to iteration {expected['written']} as they were"
        logger.warning(
            "%s %s: missing are %s. They cannot be restored",
            self.path,
            what,
            missing,
        )
        return False

    def state_dict(self) -> dict[str, Any]:
        if self._opens_itself():
            return super().state_dict()
        length, checksum = self._file.content()
        return {**super().state_dict(), "written": self._written, "length": length, "checksum": checksum}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._expected = state_dict if "checksum" in state_dict else None
        self._written = state_dict.get("written", self._last_write)

    def append(self, lines: bytes, rows: Sequence[Row]) -> None:
        """Append the lines of ``rows`` to the file, all or none."""
        self._file_handle.write(lines)
        self._written = rows[-1][0]

    @cached_property
    def _file_handle(self) -> Any:
        """detectron2's name for the file."""
        return self._file

    def _opens_itself(self) -> bool:
        """Whether a subclass did not call ``__init__``: it opens and closes ``_file_handle`` itself."""
        return "_file" not in self.__dict__

    def sync(self) -> None:
        if not self._opens_itself():
            self._file.sync()

    def close(self) -> None:
        self._file_handle.close()
