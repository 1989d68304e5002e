"""Writing files so that a crash at any moment leaves the old content or the new, never a part."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any

__all__ = ["displaced", "put_back", "remove_leftovers", "replace_file", "replace_text", "sync_directory"]

_TEMPORARY = re.compile(r"(.+)\.tmp\.\d+")
_DISPLACED = re.compile(r"(.+)\.old\.\d+")

# Temporary files that this process is writing; another process may have had the same number.
_writing: set[str] = set()


def replace_file(path: str, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a local file under a temporary name beside it, bring it to the disk, and rename it to ``path``.

    Args:
        path: the file to create or replace. Whatever fails, an existing one is not touched.
        write: called with the open file, which can be read as well.
    """
    temporary = f"{path}.tmp.{os.getpid()}"
    _writing.add(os.path.abspath(temporary))
    try:
        with open(temporary, "wb+") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        with displaced(path) if os.path.isdir(path) else nullcontext():
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the folder may be gone; the first error is the one to tell
            os.remove(temporary)
        raise
    finally:
        _writing.discard(os.path.abspath(temporary))
    sync_directory(os.path.dirname(os.path.abspath(path)))


def replace_text(path: str, text: str) -> None:
    """:func:`replace_file` for a text."""
    replace_file(path, lambda file: file.write(text.encode()))


def remove_leftovers(folder: str, endings: tuple[str, ...]) -> list[str]:
    """Remove the temporary files that killed processes left in a folder, where nobody else writes such files now.

    Args:
        folder: of the files; it need not exist.
        endings: of the names that the files were to have.

    Returns:
        The names of what was removed.
    """
    removed = []
    with suppress(OSError):
        for name in os.listdir(folder):
            match, path = _TEMPORARY.fullmatch(name), os.path.abspath(os.path.join(folder, name))
            if match is None or not match[1].endswith(endings) or path in _writing:
                continue
            with suppress(OSError):
                if os.path.isdir(path):
                    shutil.rmtree(path)
                else:
                    os.remove(path)
                removed.append(name)
    return removed


def put_back(folder: str) -> list[str]:
    """Undo what a process had begun that was killed as it replaced a folder (see :func:`displaced`).

    Args:
        folder: of what was replaced; it need not exist.

    Returns:
        The names of what is in its place again.
    """
    back = []
    with suppress(OSError):
        for name in os.listdir(folder):
            match, aside = _DISPLACED.fullmatch(name), os.path.join(folder, name)
            if match is None:
                continue
            with suppress(OSError):
                if not os.path.lexists(os.path.join(folder, match[1])):
                    os.rename(aside, os.path.join(folder, match[1]))
                    back.append(match[1])
                elif os.path.isdir(aside):
                    shutil.rmtree(aside)
                else:
                    os.remove(aside)
    return back


@contextmanager
def displaced(path: str) -> Iterator[None]:
    """Within it whatever stands at ``path`` is out of the way, for what no rename replaces: a folder, or by a folder.

    It goes when that was successful, and otherwise comes back; if the process is killed, by :func:`put_back`.
    """
    aside = f"{path}.old.{os.getpid()}"
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
    if os.path.isdir(aside):
        shutil.rmtree(aside, ignore_errors=True)
    elif aside:
        os.remove(aside)


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
