"""Files with one line per row, which a resume compares with the checkpoint."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from ...config.files.atomic import check_regular, replace_file
from ...config.files.run_folder import claim
from ..storage.event_storage import Row
from .append_file import AppendFile, back_up
from .base import RowWriter

__all__ = ["LineWriter"]

logger = logging.getLogger(__name__)


class LineWriter(RowWriter):
    """A writer of one line per row. A subclass defines :meth:`write_rows`, :meth:`cut` and :meth:`last_iteration`.

    A checkpoint holds the iteration of its last row. A resume logs a warning if the file ends before it, and removes
    the rows from where the run continues.

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
        self._file = AppendFile(path)
        self._expected = -1  # the last iteration of the checkpoint's rows, until training begins

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
        expected, self._expected = self._expected, -1
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

    def check_file(self) -> None:
        if not self._opens_itself():
            self._check(self._content(), self._expected)

    def _content(self) -> bytes:
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            return file.read()
        return b""

    def _check(self, data: bytes, expected: int) -> bool:
        """Return whether the rows up to iteration ``expected`` are in the file; if not, log what is missing."""
        try:
            last = self.last_iteration(self.cut(data, expected + 1))
        except ValueError:
            last = -1
        if last >= expected:
            return True
        missing = f"after iteration {last}" if last >= 0 else "of all iterations"
        logger.warning("%s: the rows %s up to %d are missing, and cannot be restored", self.path, missing, expected)
        return False

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._expected = self._last_write

    def append(self, lines: bytes, rows: Sequence[Row]) -> None:
        """Append the lines of ``rows`` to the file, all or none."""
        self._file_handle.write(lines)

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
