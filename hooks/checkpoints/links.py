"""Second names for files and folders of weights."""

import os
import shutil
from contextlib import nullcontext
from typing import Any

from ...config.files.atomic import displaced, sync_directory, temporary_path
from ...config.files.run_folder import claim

__all__ = ["link"]


def link(source: str, target: str, path_manager: Any) -> None:
    """Make ``target`` a second name of ``source``, replacing an existing file. A missing ``source`` is ignored.

    Files are hard links, or copies where the file system has none; in a folder each file is linked. A process killed
    in between leaves either the old ``target`` or the new one.

    Args:
        source: a file or folder; a URI is copied.
        target: its second name.
        path_manager: copies URIs.
    """
    if "://" in source:
        path_manager.copy(source, target, overwrite=True)
        return
    if not os.path.exists(source) or (os.path.exists(target) and os.path.samefile(source, target)):
        return
    claim(target)
    temporary = temporary_path(target)
    if os.path.isdir(source):  # a sharded checkpoint
        shutil.copytree(source, temporary, copy_function=_link_file)
    else:
        _link_file(source, temporary)
    folder = os.path.isdir(source) or os.path.isdir(target)
    with displaced(target) if folder else nullcontext():
        os.replace(temporary, target)
    sync_directory(os.path.dirname(os.path.abspath(target)))


def _link_file(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)
