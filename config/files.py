"""Writing files so that a crash at any moment leaves the old content or the new, never a part."""

import os
from collections.abc import Callable
from typing import IO, Any

__all__ = ["replace_file", "replace_text"]


def replace_file(path: str, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a local file under a temporary name beside it, bring it to the disk, and rename it to ``path``.

    Args:
        path: the file to create or replace. Whatever fails, an existing one is not touched.
        write: called with the open file.
    """
    temporary = f"{path}.tmp.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise
    _sync_directory(os.path.dirname(os.path.abspath(path)))


def replace_text(path: str, text: str) -> None:
    """:func:`replace_file` for a text."""
    replace_file(path, lambda file: file.write(text.encode()))


def _sync_directory(path: str) -> None:
    """Bring a rename to the disk, where the system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # not possible on some systems
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
