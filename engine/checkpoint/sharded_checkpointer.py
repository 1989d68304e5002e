"""The checkpointer of runs whose ranks hold parts of the model each."""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...config import ConfigError
from .. import comm
from .checkpointer import Checkpointer
from .matching import plain_name
from .sharded import (
    Keys,
    fail_together,
    is_sharded_folder,
    like_model,
    local_parts,
    shard,
    split_shards,
    with_parts,
    write_folder,
)
from .staging import compact
from .state import to_plain
from .weights import read_checkpoint

__all__ = ["ShardedCheckpointer"]


class ShardedCheckpointer(Checkpointer):
    """A :class:`Checkpointer` with which every rank writes the parts it has: a checkpoint is a folder.

    No rank ever holds the whole state. All ranks call the same methods in the same order, so a rank that fails alone
    saves nothing. Files of one process are read as well, and its folders by any process: ``<name>.pth`` may be the
    one or the other.

    Args:
        model: with sharded parameters.
        save_dir: a local folder, that all machines share.
        asynchronous, on_error, **checkpointables: as for :class:`Checkpointer`.

    Raises:
        ConfigError: ``save_dir`` is a URI.
    """

    needs_all_ranks = True
    """A rank cannot save by itself."""

    def __init__(self, model: nn.Module, save_dir: str = "", **options: Any) -> None:
        if "://" in save_dir:
            raise ConfigError(f"OUTPUT_DIR: sharded checkpoints need a local folder, not {save_dir}")
        super().__init__(model, save_dir, **options)
        # A separate group: asynchronous saves use it while training uses the others.
        self._group: dist.ProcessGroup = comm.new_group(backend="gloo")

    def poll(self) -> bool:
        """Whether the asynchronous save under way has failed.

        Parts are on the disk sooner on one rank than on another, and what a save came to must be known on all of them
        from the same step on: the next :meth:`save`, :meth:`wait` or :meth:`close` tells.
        """
        return self._saver.has_failed

    @property
    def _takes_part(self) -> bool:
        return True

    def _prepare(self, path: str, further: dict[str, Any]) -> Callable[[], None]:
        rest, shards = self._split(further)
        if self._saver.asynchronous:
            rest, parts = self._staging.copy([rest, list(local_parts(shards).values())])
            shards = with_parts(shards, dict(zip(shards, parts, strict=True)))

        def write() -> None:
            with fail_together(self._group):
                if comm.is_main_process():
                    self._folder.prepare()
            write_folder(path, rest, shards, self._group)

        return write

    def _conclude(self, last: str, outdated: Iterable[str]) -> None:
        with fail_together(self._group):
            if comm.is_main_process():
                super()._conclude(last, outdated)

    def _split(self, further: dict[str, Any]) -> tuple[Any, dict[Keys, "DTensor"]]:
        """What the main process writes of the state (None on other ranks), and sharded tensors by their place."""
        state = {"model": {plain_name(name): value for name, value in self.model.state_dict().items()}}
        state |= {name: obj.state_dict() for name, obj in self.checkpointables.items()}
        rest, shards = split_shards({**state, **further})
        if not comm.is_main_process():
            return None, shards
        return compact({name: to_plain(value, name) for name, value in rest.items()}), shards

    def _load_file(self, f: str, mmap: bool = False) -> dict[str, Any]:
        """What a file or folder holds; of sharded tensors this rank's parts."""
        like = like_model(self.model, self._optimizers())
        if is_sharded_folder(f):
            return read_checkpoint(f, mmap=mmap, like=like)
        # Mapped, not read: a rank reads no more of a file than its parts.
        return shard(read_checkpoint(f, mmap=True), like)

    def _load_weights(self, f: str) -> dict[str, Any]:
        return self._load_file(f, mmap=True)

    def _optimizers(self) -> list[Any]:
        found = []
        for obj in self.checkpointables.values():
            optimizer = getattr(obj, "optimizer", obj)
            if hasattr(optimizer, "param_groups"):
                found.append(optimizer)
        return found
