"""Writing files so that a crash at any moment leaves the old content or the new, never a part.

Temporary files stand beside the file they become, so that a rename is enough. Their names begin with
``.hookline-tmp-``, and those of folders that are being replaced with ``.hookline-old-``; nobody else uses these
prefixes. The names also tell the process, so that what a killed process left can be recognized.
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
    """A new name beside ``path`` for what is to replace it. Nothing is created."""
    return _reserved_path(_TEMPORARY, path, shortened=True)


def _reserved_path(prefix: str, path: str, shortened: bool = False) -> str:
    folder, name = os.path.split(path)
    pid = os.getpid()
    maker = f"{machine_id()}-{pid}-{start_time(pid)}-{secrets.token_hex(4)}"
    return os.path.join(folder, f"{prefix}{maker}-{name[-100:] if shortened else name}")


def replace_file(path: str, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a local file under a temporary name beside it, sync it to the disk, and rename it to ``path``.

    Args:
        path: the file to create or replace. Whatever fails, an existing one is not touched.
        write: called with the open file, which can be read as well.
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
            with suppress(OSError):  # the folder may be gone; the first error is the one to raise
                os.remove(temporary)
        raise
    sync_directory(os.path.dirname(os.path.abspath(path)))


def _create(path: str, flags: int) -> int:
    """Open a file that must be new: what another program put there, a link for example, is never written to."""
    return os.open(path, flags | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)


def replace_text(path: str, text: str) -> None:
    """:func:`replace_file` for a text."""
    replace_file(path, lambda file: file.write(text.encode()))


def _leftovers(folder: str, prefix: str, alone: bool) -> Iterator[tuple[str, str]]:
    """What killed processes left in a folder under names with a reserved prefix: (path, the name it was for)."""
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
        alone: no other process writes there. Then leftovers of other machines go too; whether a process of another
            machine still runs cannot be told.

    Returns:
        The names that the files were to have.
    """
    removed = []
    for path, name in _leftovers(folder, _TEMPORARY, alone):
        with suppress(OSError):
            _remove(path)
            removed.append(name)
    return removed


def put_back(folder: str, alone: bool = False) -> list[str]:
    """Undo what a process was killed in the middle of: replacing a folder (see :func:`displaced`).

    Args:
        folder: the one that contains it; may be missing.
        alone: see :func:`remove_leftovers`.

    Returns:
        The names of what is in its place again.
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
    """Within it ``path`` is free: for a folder, or what a folder replaces, since no rename replaces those.

    What was there is removed if the block succeeds, and restored if it fails. :func:`put_back` restores it after a
    kill.
    """
    aside = _reserved_path(_DISPLACED, path)
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        aside = ""
    try:
        yield
    except BaseException:
        if aside:
            os.rename(aside, path)
        raise
    if aside:
        with suppress(OSError):
            _remove(aside)


def sync_directory(path: str) -> None:
    """Bring a rename to the disk, where the system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # not possible on some systems
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
