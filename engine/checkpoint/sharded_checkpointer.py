"""The checkpointer for models that are sharded over the ranks."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...config import ConfigError
from ...hooks.common import optimizers_of, shard_like
from .. import comm
from .checkpointer import Checkpointer
from .dcp_reader import Keys, Like
from .sharded import fail_together, is_sharded_folder, split_shards, walk, write_folder
from .state import to_plain
from .weights import read_checkpoint


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
            raise ConfigError(f"checkpoints of a sharded model are saved in a local folder, not in {save_dir}")
        super().__init__(model, save_dir, **options)
        # A separate group: asynchronous saves use it while training uses the others.
        self._group: dist.ProcessGroup = comm.new_group(backend="gloo")

    def poll(self) -> None:
        """Do nothing. Ranks finish writing at different times, but must learn the result at the same step: the next
        :meth:`save` or :meth:`wait` reports it.
        """

    def _plain(self, contents: dict[str, Any]) -> object:
        rest, shards = split_shards(contents)
        return to_plain(rest) if comm.is_main_process() else None, shards

    def _write(self, path: str, state: Any, tag_last: bool, outdated: Iterable[str]) -> None:
        with fail_together(self._group):
            if comm.is_main_process() and not self._has_folder:
                self._make_folder()
        rest, shards = state
        write_folder(path, rest, shards, self._group)
        with fail_together(self._group):
            if comm.is_main_process():
                self._conclude(path, tag_last, outdated)

    def _load_file(self, f: str, mmap: bool = False) -> dict[str, Any]:
        """Read a file or folder, with this rank's shards of sharded tensors."""
        like = like_model(self.model, [getattr(one, "optimizer", one) for one in self.checkpointables.values()])
        # Files are mapped, so that each rank reads only its shards.
        mmap = mmap or not is_sharded_folder(f)
        return shard(read_checkpoint(f, mmap=mmap, like=like, verified=f == self._verified), like)


def like_model(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> Like:
    """Return how the tensors of a run's state are sharded: weights, averaged weights and optimizer state.

    Args:
        model: the model.
        optimizers: its optimizers, in the order in which their states are saved.
    """
    weights = {name: value for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    each = [one for several in optimizers for one in optimizers_of(several) if hasattr(one, "param_groups")]
    numbered = [[parameter for group in one.param_groups for parameter in group["params"]] for one in each]

    def like(keys: Keys, shape: torch.Size) -> "DTensor | None":
        # {"state": {0: {"exp_avg": ...}}}, several as {"optimizers": [{"state": ...}]}; or a weight by its name.
        found: Any = weights.get(keys[-1])
        if len(keys) >= 3 and keys[-3] == "state" and keys[-2].isdecimal():
            several = len(keys) >= 5 and keys[-5] == "optimizers" and keys[-4].isdecimal()
            parameters = numbered[int(keys[-4])] if several else [one for some in numbered for one in some]
            found = parameters[int(keys[-2])] if int(keys[-2]) < len(parameters) else None
        return found if isinstance(found, DTensor) and found.shape == shape else None

    return like


def shard(state: object, like: Like) -> Any:
    """Shard the whole tensors of a state, which are the same on all ranks.

    Args:
        state: the content of a checkpoint of one file.
        like: how tensors are sharded in this run.
    """

    def visit(keys: Keys, value: object) -> object:
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not keys:
            return value
        one = like(keys, value.shape)
        return value if one is None else shard_like(value, one)

    return walk(state, visit)
