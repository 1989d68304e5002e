"""The folder of a run's checkpoints: files are written atomically, and only the run's own are removed."""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import IO, Any

from ...config.files.atomic import displaced, is_checkpoint_folder, remove_leftovers, replace_file
from ...config.files.run_folder import claim, is_claimed

__all__ = ["CheckpointFolder", "is_local", "read_tag"]

logger = logging.getLogger(__name__)

# Longest content of last_checkpoint that is read.
_MAX_NAME = 4096


def is_local(path: str) -> bool:
    """Return whether a path is not a URI."""
    return "://" not in path


def read_tag(folder: str, path_manager: Any = None) -> str:
    """Return the file name in a folder's ``last_checkpoint``; empty if there is none or it is not a file name.

    Raises:
        OSError: the file cannot be read.
    """
    tag = os.path.join(folder, "last_checkpoint")
    try:
        if is_local(tag) and not os.path.isfile(tag):  # reading a pipe would wait
            return ""
        with path_manager.open(tag, "r") if path_manager else open(tag) as file:
            name = str(file.read(_MAX_NAME).strip())
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
    return name if name and os.path.basename(name) == name and name.isprintable() else ""


class CheckpointFolder:
    """Writes and removes files of a local folder or a URI.

    Args:
        path: the folder; it is created at the first write.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._existed = bool(path) and is_local(path) and os.path.isdir(path)
        self._cleaned = False
        self._tagged = False

    def write(self, path: str, write: Callable[[IO[bytes]], Any], path_manager: Any) -> None:
        """Have ``write(file)`` write a local file, which then replaces ``path``.

        Behind a URI, the file is as atomic as the URI's handler makes it.

        Raises:
            OSError: the file cannot be written. An earlier file of that name is unchanged.
        """
        if is_local(path):
            claim(path)
            self.prepare()
            with displaced(path) if is_checkpoint_folder(path) else nullcontext():
                replace_file(path, write)
            self._tagged |= os.path.basename(path) == "last_checkpoint"
            return
        with tempfile.NamedTemporaryFile() as file:
            write(file)
            file.seek(0)
            try:
                with suppress(NotImplementedError):  # storage without folders
                    path_manager.mkdirs(self.path)
                with path_manager.open(path, "wb") as target:
                    shutil.copyfileobj(file, target, 1 << 24)
            except OSError:
                raise
            except Exception as error:  # handlers have their own error types
                raise OSError(f"{type(error).__name__}: {error}") from error

    def prepare(self) -> None:
        """Create the folder. Before the first save, remove temporary files of killed processes.

        Raises:
            OSError: the folder cannot be created, or it existed before and is gone. It is not created again then: a
                disk may be unmounted.
        """
        if self._existed:
            os.stat(self.path)
        else:
            os.makedirs(self.path, exist_ok=True)
        self._existed = True
        last = os.path.join(self.path, "last_checkpoint")
        if self._tagged and not os.path.exists(last):
            self._tagged = False
            logger.warning(
                "%s, which this run wrote, is gone: the folder was removed or replaced, or a disk is not mounted. "
                "The run continues in the folder that is there now",
                last,
            )
        if not self._cleaned:
            removed = remove_leftovers(self.path, alone=True)
            if removed:
                logger.info("Removed temporary files of killed processes: %s", ", ".join(removed))
            self._cleaned = True

    def remove(self, path: str, path_manager: Any) -> None:
        """Remove a checkpoint that this run wrote. Errors are logged; missing files are ignored."""
        if not is_claimed(path) or (os.path.isdir(path) and not is_checkpoint_folder(path)):
            logger.warning("%s was not written by this run, and is not removed", path)
            return
        try:
            if os.path.isdir(path):  # a sharded checkpoint
                shutil.rmtree(path)
            elif path_manager.exists(path):
                path_manager.rm(path)
        except Exception as error:  # handlers have their own error types
            logger.warning("Cannot remove the old checkpoint %s: %s", path, error)
