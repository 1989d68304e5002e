"""The checkpointer for models that are sharded over the ranks."""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...config import ConfigError
from .. import comm
from .checkpointer import Checkpointer
from .sharded import fail_together, is_sharded_folder, write_folder
from .shards import Keys, like_model, shard, split_shards
from .state import plain_name, to_plain
from .weights import read_checkpoint

__all__ = ["ShardedCheckpointer"]


class ShardedCheckpointer(Checkpointer):
    """A :class:`Checkpointer` that saves a folder, into which each rank writes its shards.

    No rank holds the whole state. All ranks must call the same methods in the same order; if one rank fails, nothing
    is saved. ``<name>.pth`` may be a folder or a file: this class also loads files, and :class:`Checkpointer` also
    loads folders.

    Args:
        model: with sharded parameters.
        save_dir: a local folder that all machines share.
        asynchronous, on_error, **checkpointables: as for :class:`Checkpointer`.

    Raises:
        ConfigError: ``save_dir`` is a URI.
    """

    needs_all_ranks = True

    def __init__(self, model: nn.Module, save_dir: str = "", **options: Any) -> None:
        if "://" in save_dir:
            raise ConfigError(f"OUTPUT_DIR: sharded checkpoints need a local folder, not {save_dir}")
        super().__init__(model, save_dir, **options)
        # A separate group: asynchronous saves use it while training uses the others.
        self._group: dist.ProcessGroup = comm.new_group(backend="gloo")

    def poll(self) -> None:
        """Do nothing. Ranks finish writing at different times, but must learn the result at the same step: the next
        :meth:`save`, :meth:`wait` or :meth:`close` reports it.
        """

    def _prepare(self, path: str, further: dict[str, Any]) -> Callable[[], None]:
        rest, shards = self.split(further)
        if self._saver.asynchronous:
            rest, *parts = self._saver.keep([rest, *(tensor.to_local() for tensor in shards.values())])
            shards = {
                keys: DTensor(part, tensor._spec, requires_grad=False)
                for (keys, tensor), part in zip(shards.items(), parts, strict=True)
            }

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

    def split(self, further: dict[str, Any]) -> tuple[Any, dict[Keys, "DTensor"]]:
        """Return the state that the main process writes (None on other ranks), and the sharded tensors by place."""
        state = {"model": {plain_name(name): value for name, value in self.model.state_dict().items()}}
        state |= {name: obj.state_dict() for name, obj in self.checkpointables.items()}
        rest, shards = split_shards({**state, **further})
        if not comm.is_main_process():
            return None, shards
        return {name: to_plain(value, name) for name, value in rest.items()}, shards

    def _load_file(self, f: str, mmap: bool = False) -> dict[str, Any]:
        """Read a file or folder, with this rank's shards of sharded tensors."""
        like = like_model(self.model, self._optimizers())
        # Files are mapped, so that each rank reads only its shards.
        return shard(read_checkpoint(f, mmap=mmap or not is_sharded_folder(f), like=like), like)

    def _load_weights(self, f: str) -> dict[str, Any]:
        return self._load_file(f, mmap=True)

    def _optimizers(self) -> list[Any]:
        found = []
        for obj in self.checkpointables.values():
            optimizer = getattr(obj, "optimizer", obj)
            if hasattr(optimizer, "param_groups"):
                found.append(optimizer)
        return found
