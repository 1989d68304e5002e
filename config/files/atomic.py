"""Write files atomically: after a crash at any moment, a file has its old content or the new.

A temporary file is in the folder of its target and is renamed to it. Temporary names begin with ``.hookline-tmp-``, and
those of folders that are being replaced with ``.hookline-old-``. The names contain the process, so that leftovers of
killed processes can be recognized.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any

from .processes import is_running, machine_id, start_time

__all__ = [
    "displaced",
    "put_back",
    "remove_leftovers",
    "replace_file",
    "replace_text",
    "sync_directory",
    "temporary_path",
]

_TEMPORARY, _DISPLACED = ".hookline-tmp-", ".hookline-old-"
_NAME = re.compile(r"\.hookline-(?:tmp|old)-([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{8}-(.+)", re.DOTALL)


def temporary_path(path: str) -> str:
    """Return a new name for a replacement of ``path``, in the same folder. Nothing is created."""
    return _reserved_path(_TEMPORARY, path, shortened=True)


def _reserved_path(prefix: str, path: str, shortened: bool = False) -> str:
    folder, name = os.path.split(path)
    pid = os.getpid()
    maker = f"{machine_id()}-{pid}-{start_time(pid)}-{secrets.token_hex(4)}"
    return os.path.join(folder, f"{prefix}{maker}-{name[-100:] if shortened else name}")


def replace_file(path: str, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a local file under a temporary name beside it, sync it to the disk, and rename it to ``path``.

    Args:
        path: the file to create or replace. After an error, an existing file is unchanged.
        write: called with the open file, which can also be read.
    """
    temporary = temporary_path(path)
    created = False
    try:
        with open(temporary, "wb+", opener=_create) as file:
            created = True
            write(file)
            file.flush()
            os.fsync(file.fileno())
        with displaced(path) if os.path.isdir(path) else nullcontext():
            os.replace(temporary, path)
    except BaseException:
        if created:
            with suppress(OSError):  # the folder may be gone; raise the first error
                os.remove(temporary)
        raise
    sync_directory(os.path.dirname(os.path.abspath(path)))


def _create(path: str, flags: int) -> int:
    """Open a file that must be new: never write to a file or link of another program."""
    return os.open(path, flags | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)


def replace_text(path: str, text: str) -> None:
    """:func:`replace_file` for a text."""
    replace_file(path, lambda file: file.write(text.encode()))


def _leftovers(folder: str, prefix: str, alone: bool) -> Iterator[tuple[str, str]]:
    """Yield leftovers of killed processes with a reserved prefix: (path, target name)."""
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            match = _NAME.fullmatch(name) if name.startswith(prefix) else None
            if match is None:
                continue
            here = match[1] == machine_id()
            if (here and not is_running(int(match[2]), int(match[3]))) or (alone and not here):
                yield os.path.join(folder, name), match[4]


def remove_leftovers(folder: str, alone: bool = False) -> list[str]:
    """Remove the temporary files and folders that killed processes left in a folder.

    Args:
        folder: may be missing.
        alone: no other process writes there: remove leftovers of other machines too, whose processes cannot be
            checked.

    Returns:
        The target names of the files.
    """
    removed = []
    for path, name in _leftovers(folder, _TEMPORARY, alone):
        with suppress(OSError):
            _remove(path)
            removed.append(name)
    return removed


def put_back(folder: str, alone: bool = False) -> list[str]:
    """Undo the replacement of a folder (see :func:`displaced`) that a kill interrupted.

    Args:
        folder: its parent folder; may be missing.
        alone: see :func:`remove_leftovers`.

    Returns:
        The names that were restored.
    """
    back = []
    for path, name in _leftovers(folder, _DISPLACED, alone):
        with suppress(OSError):
            if os.path.lexists(os.path.join(folder, name)):
                _remove(path)
            else:
                os.rename(path, os.path.join(folder, name))
                back.append(name)
    return back


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


@contextmanager
def displaced(path: str) -> Iterator[None]:
    """Move ``path`` away within the block, since a rename cannot replace a folder.

    The old content is removed if the block succeeds, and restored if it fails. :func:`put_back` restores it after a
    kill.
    """
    moved = _reserved_path(_DISPLACED, path)
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
            _remove(moved)


def sync_directory(path: str) -> None:
    """Flush a folder to disk, so that renames in it are durable. Does nothing if the system cannot."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # not possible on some systems
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
