"""The names of a run's files."""

import errno
import fnmatch
import json
import os
from contextlib import suppress

from .atomic import replace_text

__all__ = ["RECORDS", "Manifest", "is_inside"]

RECORDS = ".hookline"
"""The folder in OUTPUT_DIR for the records of a run."""


class Manifest:
    """The names of a run's files and folders, relative to its folder, in a file of JSON lines.

    A name is added before its file is created.

    Args:
        folder: the run's folder.
        path: the file.

    Attributes:
        names: of files and folders.
        patterns: fnmatch patterns, for files whose names a library chooses.
    """

    def __init__(self, folder: str, path: str) -> None:
        self._folder = folder
        self._path = path
        self.names: set[str] = set()
        self.patterns: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether a name is a file of the run, or in a folder of the run."""
        name = os.path.normpath(name)
        while name not in ("", os.sep):
            if name in self.names or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns):
                return True
            name = os.path.dirname(name)
        return False

    def existing(self) -> list[str]:
        """Return the names that exist; not those inside of a folder of the run, which belong to the folder."""
        found = {name for name in self.names if os.path.lexists(os.path.join(self._folder, name))}
        for pattern in self.patterns:
            parent = os.path.dirname(pattern)
            with suppress(OSError):
                names = (os.path.join(parent, name) for name in os.listdir(os.path.join(self._folder, parent)))
                found.update(name for name in names if fnmatch.fnmatchcase(name, pattern))
        return sorted(name for name in found if os.path.dirname(name) not in self)

    def read(self) -> None:
        """Read the file; without one the manifest is empty."""
        self.names, self.patterns = set(), set()
        try:
            with open(self._path, encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            try:
                entries = json.loads(line).items()
            except (ValueError, AttributeError):  # an incomplete line of a killed process
                continue
            for kind, name in entries:
                if isinstance(name, str) and is_inside(name) and kind in ("name", "pattern"):
                    (self.names if kind == "name" else self.patterns).add(name)

    def add(self, name: str, pattern: bool = False) -> None:
        """Add a name or a pattern.

        Raises:
            OSError: the file is gone, or cannot be written.
        """
        # No O_CREAT: a removed folder is not created again. A single write, so that lines of two processes do not mix.
        # It starts with a newline, since the last line may be incomplete.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"\n{json.dumps({'pattern' if pattern else 'name': name})}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        (self.patterns if pattern else self.names).add(name)

    def start(self) -> None:
        """Write an empty manifest."""
        replace_text(self._path, "")
        self.names, self.patterns = set(), set()

    def ensure(self) -> None:
        """Write an empty manifest if there is none."""
        if not os.path.isfile(self._path):
            self.start()

    def check_exists(self) -> None:
        """Raise a FileNotFoundError if the file is gone: the folder was removed or replaced since it was taken."""
        if not os.path.exists(self._path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path)


def is_inside(name: str) -> bool:
    """Whether a name is inside of a run's folder, and not one of its records."""
    parts = os.path.normpath(name).split(os.sep)
    return bool(name) and not os.path.isabs(name) and parts[0] not in (os.pardir, os.curdir, RECORDS)
