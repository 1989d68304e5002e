"""A file that rows are appended to."""

import os
from contextlib import suppress

from ...config.files.atomic import check_regular, free_name, replace_file, sync_directory
from ...config.files.run_folder import claim

__all__ = ["AppendFile", "back_up"]


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
        """Append ``data``, all or nothing. If truncating after a failure fails too, the next write truncates.

        Raises:
            OSError: the data could not be written.
            ConfigError: the path is not a regular file.
        """
        data = data.encode() if isinstance(data, str) else data
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

    def fileno(self) -> int:
        """Return the descriptor of the open file."""
        if self._descriptor < 0:
            check_regular(self.path)
            claim(self.path)
            folder = os.path.dirname(os.path.abspath(self.path))
            os.makedirs(folder, exist_ok=True)
            is_new = not os.path.exists(self.path)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._length, self._torn = os.fstat(self._descriptor).st_size, False
            if is_new:
                sync_directory(folder)
        return self._descriptor

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def sync(self) -> None:
        """Sync the content to the disk."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Sync and close the file. The next write opens it again."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                if self._torn:
                    os.ftruncate(descriptor, self._length)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


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
