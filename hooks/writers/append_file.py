"""A file that rows are appended to."""

import os
import stat
import zlib
from contextlib import suppress

from ...config import ConfigError
from ...config.files.atomic import sync_directory
from ...config.files.run_folder import claim

__all__ = ["AppendFile", "check_regular", "keep_aside"]


class AppendFile:
    """A local file that grows by whole pieces. It is opened, and created if missing, with the first piece.

    Args:
        path: the file. Pieces are appended to what it holds.
        checksum: whether to keep a checksum of the content, which takes reading the file when it is opened.
    """

    def __init__(self, path: str, checksum: bool = False) -> None:
        self.path = path
        self._with_checksum = checksum
        self._descriptor = -1
        self._length = 0
        self._checksum = 0
        self._torn = False  # whether a part of a piece may stand at the end

    def write(self, piece: bytes | str) -> None:
        """Append a piece. If that fails, the file is as it was before, at the latest when the next piece comes.

        Raises:
            OSError: the piece could not be written.
            ConfigError: the path is not a regular file.
        """
        data = piece.encode() if isinstance(piece, str) else piece
        descriptor = self.fileno()
        try:
            if self._torn:
                os.ftruncate(descriptor, self._length)
            self._torn = True
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
        except BaseException:
            with suppress(OSError):
                os.ftruncate(descriptor, self._length)
            raise
        self._torn = False
        self._length += len(data)
        if self._with_checksum:
            self._checksum = zlib.crc32(data, self._checksum)

    def fileno(self) -> int:
        """The descriptor of the open file."""
        if self._descriptor < 0:
            check_regular(self.path)
            claim(self.path)
            folder = os.path.dirname(os.path.abspath(self.path))
            os.makedirs(folder, exist_ok=True)
            is_new = not os.path.exists(self.path)
            length, checksum = self.content()
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._length, self._checksum, self._torn = length, checksum, False
            if is_new:
                sync_directory(folder)
        return self._descriptor

    def content(self) -> tuple[int, int]:
        """Length and checksum (0 without) of what the file holds."""
        if self._descriptor >= 0:
            return self._length, self._checksum
        if not self._with_checksum:
            return (os.path.getsize(self.path) if os.path.exists(self.path) else 0), 0
        length = checksum = 0
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            while block := file.read(1 << 20):
                length, checksum = length + len(block), zlib.crc32(block, checksum)
        return length, checksum

    def flush(self) -> None:
        """Nothing waits: a piece is in the file when :meth:`write` returns."""

    def sync(self) -> None:
        """Bring the content to the disk."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Bring the content to the disk and close the file; the next piece opens it again."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                if self._torn:
                    os.ftruncate(descriptor, self._length)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def check_regular(path: str) -> None:
    """Check that a path is a regular file, or nothing yet.

    Raises:
        ConfigError: it is a folder, a FIFO (opening one waits for a reader, maybe forever) or another special file.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "a special file"
        raise ConfigError(f"{path} is {kind}, and metrics can only be written to a regular file: remove it")


def keep_aside(path: str, copy: bytes | None = None) -> str:
    """Keep a file under the first free name of ``<path>.old``, ``<path>.old2`` and so on.

    Args:
        path: the file, which is renamed.
        copy: its content, if a copy is to be kept instead.

    Returns:
        The name.
    """
    number, name = 1, f"{path}.old"
    while True:
        try:
            if not os.path.lexists(name):
                claim(name)
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            break
        except FileExistsError:
            number += 1
            name = f"{path}.old{number}"
    with open(descriptor, "wb") as file:
        if copy is not None:
            file.write(copy)
            file.flush()
            os.fsync(descriptor)
    if copy is None:
        os.replace(path, name)
    return name
