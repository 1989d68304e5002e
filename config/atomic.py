"""Write files atomically, and the errors of that: after a crash at any moment, a file has its old content or the new.

A temporary file is in the folder of its target and is renamed to it. Temporary names begin with ``.hookline-tmp-``, and
those of checkpoint folders that are being replaced with ``.hookline-old-``. A token in the names tells the files of
this process from those that another one has left.
"""

import errno
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import methodcaller
from typing import IO, Any, Literal, Self

from .errors import ConfigError, printable

logger = logging.getLogger(__name__)

_TEMPORARY, _DISPLACED = ".hookline-tmp-", ".hookline-old-"
_NAME = re.compile(r"\.hookline-(tmp|old)-([0-9a-f]{8})-[0-9a-f]{8}-(.+)", re.DOTALL)
_PROCESS = secrets.token_hex(4)


def _after_fork() -> None:
    global _PROCESS
    _PROCESS = secrets.token_hex(4)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def temporary_path(path: str) -> str:
    """Return a new name for a replacement of ``path``, in the same folder. Nothing is created."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{_TEMPORARY}{_PROCESS}-{secrets.token_hex(4)}-{name[-100:]}")


def replace_file(path: str, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a local file under a temporary name beside it, sync it to the disk, and rename it to ``path``.

    Args:
        path: the file to create or replace. After an error, an existing file is unchanged.
        write: called with the open file, which can also be read.

    Raises:
        ConfigError: ``path`` is a folder.
    """
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder, and a file is to be written there: move it away or choose another name")
    temporary = temporary_path(path)
    try:
        with open(temporary, "xb+") as file:  # it must be new: never write to a file or link of another program
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the folder may be gone; raise the first error
            os.remove(temporary)
        raise
    sync_directory(os.path.dirname(os.path.abspath(path)))


def replace_text(path: str, text: str) -> None:
    """:func:`replace_file` for a text."""
    replace_file(path, methodcaller("write", text.encode()))


def free_name(path: str) -> str:
    """Return the first of ``<path>.old``, ``<path>.old2``, ... that does not exist."""
    number, name = 1, f"{path}.old"
    while os.path.lexists(name):
        number += 1
        name = f"{path}.old{number}"
    return name


def check_regular(path: str) -> None:
    """Check that a path may be opened and written to: it is a regular file with no other name, or does not exist.

    Raises:
        ConfigError: it is a link or has hard links (a write would change another file), a folder, a FIFO (opening one
            may block forever) or another special file.
    """
    check_no_link(path)
    try:
        found = os.lstat(path)
    except OSError:
        return
    mode = found.st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "a special file"
        raise ConfigError(f"{path} is {kind}, and a run needs a regular file there: remove it")
    if found.st_nlink > 1:
        raise ConfigError(f"{path} has hard links, and writing to it would change them: replace it by a copy")


def check_no_link(path: str) -> None:
    """Raise a ConfigError if a path is a symbolic link: a run does not follow links out of its folder."""
    if os.path.islink(path):
        raise ConfigError(
            f"{path} is a link to {printable(os.readlink(path))}, and a run writes only in its own folder: replace the "
            "link by a copy, or remove it"
        )


def mend(folder: str) -> None:
    """Undo what killed processes have left half done in a folder, where no other process may write.

    A checkpoint that was being replaced (see :func:`displaced`) is put back; temporary files and folders are removed.
    """
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        match = _NAME.fullmatch(name)
        if match is None or match[2] == _PROCESS:
            continue
        path, target = os.path.join(folder, name), os.path.join(folder, match[3])
        with suppress(OSError):
            if match[1] == "tmp" or os.path.lexists(target):
                remove_path(path)
            else:
                os.rename(path, target)


def remove_path(path: str) -> None:
    """Remove a file, a link or a folder. What a link points to stays."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def is_checkpoint_folder(path: str) -> bool:
    """Whether a path is a folder that hookline wrote: a sharded checkpoint. Other folders are never removed."""
    return os.path.isdir(path) and os.path.isfile(os.path.join(path, "checksums.json"))


@contextmanager
def displaced(path: str) -> Iterator[None]:
    """Move a checkpoint away within the block, since a rename cannot replace a folder.

    The old content is removed if the block succeeds, and restored if it fails. :func:`mend` restores it after a
    kill. A folder that is not a whole checkpoint, which may be a user's, is renamed to ``<path>.old``, and stays.
    """
    if os.path.isdir(path) and not os.path.islink(path) and not is_checkpoint_folder(path):
        os.rename(path, other := free_name(path))
        logger.warning("%s is a folder, and not a whole checkpoint. It is now %s", path, other)
    folder, name = os.path.split(path)
    moved = os.path.join(folder, f"{_DISPLACED}{_PROCESS}-{secrets.token_hex(4)}-{name}")
    try:
        os.rename(path, moved)
    except FileNotFoundError:
        moved = ""
    try:
        yield
    except BaseException:
        if moved:
            os.rename(moved, path)
        raise
    if moved:
        with suppress(OSError):
            remove_path(moved)


def sync_directory(path: str) -> None:
    """Flush a folder to disk, so that renames in it are durable. Does nothing if the system cannot."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # not possible on some systems
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # file systems that cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def shown_path(path: str) -> str:
    """Return a path as messages show it: relative if it is below the current folder."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else os.path.join(os.curdir, relative)


# ---------------------------------------------------------------------- errors


OnError = Literal["stop", "continue"]
"""What a run does if a file (checkpoint, metrics, events) cannot be written twice in a row."""


def check_on_error(value: str) -> None:
    """Raise a ConfigError unless ``value`` is an :data:`OnError`."""
    if value not in ("stop", "continue"):
        raise ConfigError(f'on_error must be "stop" or "continue", not {value!r}')


class WriteError(OSError):
    """A file could not be written. The message has the path, the cause and advice."""

    verb = "write"

    @classmethod
    def of(cls, path: str, cause: OSError) -> Self:
        return cls(cause.errno, cause.strerror or str(cause) or type(cause).__name__, path)

    def __str__(self) -> str:
        advice = "choose another folder (OUTPUT_DIR)"
        if self.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"make room there (CHECKPOINT.MAX_TO_KEEP keeps fewer checkpoints), or {advice}"
        elif self.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = f"allow writing there, or {advice}"
        return f"cannot {self.verb} {self.filename}: {self.strerror}; {advice}"
