"""The files of the best weights: their names, what they hold, and how one gets a second name."""

import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from ...config.files.atomic import displaced, sync_directory, temporary_path
from ...config.files.run_folder import claim, is_claimed

__all__ = ["BestFiles", "Entry"]

logger = logging.getLogger(__name__)

Entry = tuple[float, int]
"""The value of a metric, and the iteration it was put at."""


class BestFiles:
    """The files that a :class:`~hookline.hooks.BestCheckpointer` keeps in its checkpointer's folder.

    ``<prefix>.pth`` is the best, ``<prefix>_0000999.pth`` one that is kept under its iteration's name, and
    ``<prefix>_0000999_aside.pth`` one of a course that the run has left. Each is a file or, of a sharded run, a folder.

    Args:
        checkpointer: whose folder it is.
        prefix: how the names begin.
        metric: whose values they hold.
    """

    def __init__(self, checkpointer: Any, prefix: str, metric: str) -> None:
        self._checkpointer = checkpointer
        self._prefix = prefix
        self._metric = metric
        self._pattern = re.compile(rf"{re.escape(prefix)}(?:_(\d{{7,}})(_aside)?)?\.pth")

    @property
    def writes(self) -> bool:
        """Whether this process writes files."""
        return bool(self._checkpointer.save_dir) and self._checkpointer.save_to_disk

    def path(self, iteration: int | None = None, aside: bool = False) -> str:
        """Of the best one's file; given an iteration, of what is kept under its name."""
        name = self._prefix if iteration is None else f"{self._prefix}_{iteration:07d}"
        return os.path.join(self._checkpointer.save_dir, f"{name}{'_aside' if aside else ''}.pth")

    def owns(self, path: str) -> bool:
        """Whether a path is of one of these files."""
        return self._pattern.fullmatch(os.path.basename(path)) is not None

    def find(self, listed: Iterable[int]) -> tuple[set[int], set[int]]:
        """Which files there are under an iteration's name.

        Args:
            listed: iterations to look for also where a folder cannot be listed, as behind some URIs.

        Returns:
            The iterations of those that are kept, and of those that were put aside.
        """
        kept = {iteration for iteration in listed if self._checkpointer.path_manager.exists(self.path(iteration))}
        aside: set[int] = set()
        try:
            names = self._checkpointer.path_manager.ls(self._checkpointer.save_dir)
        except (OSError, NotImplementedError):
            names = []
        for match in filter(None, map(self._pattern.fullmatch, names)):
            if match[1]:
                (aside if match[2] else kept).add(int(match[1]))
        return kept, aside

    def read(self, path: str, untold: Entry | None = None) -> Entry | None:
        """What a file says it holds.

        Args:
            path: of the file.
            untold: what it is taken to hold if it is whole and says nothing, as detectron2's.

        Returns:
            The value and the iteration; None if there is no file, it is damaged, or of another metric.
        """
        content = self.content(path)
        if content is None:
            return None
        if "best_metric" not in content:
            return untold
        return _entry(content) if content["best_metric"].get("name") == self._metric else None

    def content(self, path: str) -> Mapping[str, Any] | None:
        """What is in a file; None if there is none, or it is damaged."""
        if not self._checkpointer.path_manager.exists(path):
            return None
        try:
            local = self._checkpointer.path_manager.get_local_path(path)
            local = os.path.join(local, "state.pth") if os.path.isdir(local) else local
            if not os.path.isfile(local):  # a pipe would be waited for
                raise ValueError("it is not a file")
            content = torch.load(local, map_location="cpu", weights_only=True, mmap=True)
            if "best_metric" in content:
                _entry(content)
            return content
        except Exception as error:  # of any kind, as the bytes happen to be
            logger.warning("%s cannot be read, and will be replaced: %s", path, error)
            return None

    def name(self, source: str, target: str) -> None:
        """Give a file a second name, or another's in its place. Files are replaced, never changed, so one copy of the
        bytes is enough. A kill leaves what was at ``target`` or what is to be there."""
        if "://" in source:
            self._checkpointer.path_manager.copy(source, target, overwrite=True)
            return
        if not os.path.exists(source) or (os.path.exists(target) and os.path.samefile(source, target)):
            return
        claim(target)
        temporary = temporary_path(target)
        if os.path.isdir(source):  # of a sharded run
            shutil.copytree(source, temporary, copy_function=_link_file)
        else:
            _link_file(source, temporary)
        folder = os.path.isdir(source) or os.path.isdir(target)
        with displaced(target) if folder else nullcontext():
            os.replace(temporary, target)
        sync_directory(os.path.dirname(os.path.abspath(target)))

    def remove(self, path: str) -> None:
        """Remove a file or folder; a missing one is ignored."""
        if not is_claimed(path):
            logger.warning("%s was not written by this run, and so it is not removed", path)
            return
        try:
            if os.path.isdir(path):
                shutil.rmtree(path)
            elif self._checkpointer.path_manager.exists(path):
                self._checkpointer.path_manager.rm(path)
        except Exception as error:  # of the disk, or a handler's own; no reason to end a run
            logger.warning("Cannot remove %s, which is no longer one of the best: %s", path, error)


def _entry(content: Mapping[str, Any]) -> Entry:
    told, iteration = content["best_metric"], int(content["iteration"])
    return float(told["value"]), iteration


def _link_file(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)
