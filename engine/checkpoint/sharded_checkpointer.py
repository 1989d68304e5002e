"""The checkpointer of runs whose ranks hold parts of the model each."""

import logging
import os
import shutil
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from ...config import ConfigError
from .. import comm
from ..state import to_plain
from .checkpointer import Checkpointer
from .matching import plain_name
from .saver import Then
from .sharded import (
    is_sharded_folder,
    like_model,
    local_parts,
    read_folder,
    shard,
    split_shards,
    with_parts,
    write_folder,
)
from .storages import compact
from .weights import read_checkpoint

__all__ = ["ShardedCheckpointer"]

logger = logging.getLogger(__name__)


class ShardedCheckpointer(Checkpointer):
    """A :class:`Checkpointer` with which every rank writes the parts it has: a checkpoint is a folder.

    No rank ever holds the whole state. All ranks call the same methods in the same order. Files of one process are
    read as well, and its folders by any process: ``<name>.pth`` may be the one or the other.

    Args:
        model: with sharded parameters.
        save_dir: a local folder, that all machines share.
        asynchronous, on_error, **checkpointables: as for :class:`Checkpointer`.

    Raises:
        ConfigError: ``save_dir`` is a URI.
    """

    def __init__(self, model: nn.Module, save_dir: str = "", **options: Any) -> None:
        if "://" in save_dir:
            raise ConfigError(f"OUTPUT_DIR: sharded checkpoints need a local folder, not {save_dir}")
        super().__init__(model, save_dir, **options)
        # Of their own: asynchronous saves exchange while training does.
        self._group: dist.ProcessGroup = dist.new_group(backend="gloo")

    def save(
        self, name: str, *, tag_last: bool = True, outdated: Iterable[str] = (), then: Then | None = None, **kwargs: Any
    ) -> None:
        """See :meth:`Checkpointer.save`. An OSError of one rank is one of all."""
        if not self.save_dir:
            if then is not None:
                then(None)
            return
        if os.path.basename(name) != name:
            raise ValueError(f"a checkpoint's name must not contain a folder: {name!r}")
        self.wait()
        state, shards = self._split(kwargs)
        if self._saver.asynchronous:
            state, parts = self._staging.copy([state, list(local_parts(shards).values())])
            shards = with_parts(shards, dict(zip(shards, parts, strict=True)))
        path = os.path.join(self.save_dir, f"{name}.pth")
        self.logger.debug("Saving checkpoint to %s", path)
        outdated = [old for old in outdated if old != path]

        def write() -> None:
            self._staging.wait()
            write_folder(path, state, shards, self._group)
            if comm.is_main_process():
                if tag_last:
                    self.tag_last_checkpoint(f"{name}.pth")
                for old in outdated:
                    self._remove(old)

        self._saver.write(path, write, then)

    def _split(self, further: dict[str, Any]) -> tuple[Any, dict[Any, Any]]:
        state = {"model": {plain_name(name): value for name, value in self.model.state_dict().items()}}
        state |= {name: obj.state_dict() for name, obj in self.checkpointables.items()}
        rest, shards = split_shards({**state, **further})
        return compact({name: to_plain(value, name) for name, value in rest.items()}), shards

    def _load_file(self, f: str, mmap: bool = False) -> dict[str, Any]:
        """What a file or folder holds; of sharded tensors this rank's parts."""
        like = like_model(self.model, self._optimizers())
        if is_sharded_folder(f):
            return read_folder(f, like)
        return shard(read_checkpoint(f, mmap=mmap), like)

    def _optimizers(self) -> list[Any]:
        found = []
        for obj in self.checkpointables.values():
            optimizer = getattr(obj, "optimizer", obj)
            if hasattr(optimizer, "param_groups"):
                found.append(optimizer)
        return found

    def _remove(self, path: str) -> None:
        if not os.path.isdir(path):
            super()._remove(path)
            return
        try:
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("Cannot remove the old checkpoint %s: %s", path, error)
