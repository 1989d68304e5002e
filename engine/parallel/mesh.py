"""The strategy "mesh": replicas, shards and tensor parallelism over one grid of ranks."""

import logging
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...config import ConfigError
from .. import comm
from .base import STRATEGY_REGISTRY
from .copies import differing_copies, share_weights
from .ddp import DDP
from .fsdp import FSDP2
from .tensor_parallel import Plan, check_words, find_plan, parallelize, splits

if TYPE_CHECKING:  # slow to import
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

_DIMS = ("replicate", "shard", "tensor")


@dataclass(eq=False, kw_only=True)
@STRATEGY_REGISTRY.register(name="mesh")
class Mesh(FSDP2):
    """Ranks in a grid of ``replicate`` x ``shard`` x ``tensor``, whose product is the number of ranks.

    ``replicate`` alone is DDP, ``shard`` alone FSDP2, both together hybrid sharding (HSDP): shards within groups of
    ranks, copies between groups. ``tensor`` splits the layers of a plan (Shoeybi et al., "Megatron-LM",
    arXiv:1909.08053); those ranks share a batch, so they should be on one machine, and they are: the last dimension
    has neighbouring ranks. The other arguments are those of ``fsdp2``.

    Args:
        replicate: number of copies of the model. -1 for one of the three: what is left.
        shard: over how many ranks each copy is sharded.
        tensor: over how many ranks layers are split.
        plan: how to split which modules, by name ("blocks.*.mlp") or class. "colwise": the outputs of a Linear or
            Embedding; "rowwise": the inputs of a Linear, which are the outputs of a "colwise" layer, or the vocabulary
            of an Embedding; "replicate": nothing. "colwise->replicate" gathers the output, "replicate->rowwise" splits
            a whole input. In Python also objects of torch's ``ParallelStyle``. Empty: the model's
            ``tensor_parallel_plan``, or its ``_tp_plan`` (transformers).
        modules: the submodules that are gathered together.
        min_params: without ``modules``: their smallest number of parameters.
        param_dtype: gather and compute in this dtype.
        reduce_dtype: sum gradients in this dtype.
        reshard_after_forward: free a unit's parameters after the forward pass.
        cpu_offload: keep parameters, gradients and optimizer state in CPU memory.
        init: where the model is built.
    """

    replicate: int = 1
    shard: int = -1
    tensor: int = 1
    plan: Plan | None = None

    def __post_init__(self) -> None:
        sizes = [self.replicate, self.shard, self.tensor]
        if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
            raise ConfigError(
                f"PARALLEL.ARGS: {', '.join(_DIMS)} must be at least 1, and one can be -1, what is left; not {sizes}"
            )
        self._tensor_mesh: DeviceMesh | None = None
        check_words(self.plan or {})

    def sizes(self, ranks: int) -> tuple[int, int, int]:
        """Return the sizes of the grid, replicate, shard and tensor, for a number of ranks.

        Raises:
            ConfigError: they do not multiply to it.
        """
        sizes = self.replicate, self.shard, self.tensor
        product = math.prod(size for size in sizes if size != -1)
        if ranks % product or (-1 not in sizes and ranks != product):
            raise ConfigError(
                f"PARALLEL.ARGS: replicate {self.replicate} x shard {self.shard} x tensor {self.tensor} does not give "
                f"the number of ranks, {ranks}. Start {product} ranks, or set one of the three to -1, what is left"
            )
        replicate, shard, tensor = (ranks // product if size == -1 else size for size in sizes)
        return replicate, shard, tensor

    @property
    def data_rank(self) -> int:
        return comm.get_rank() // self._own_sizes()[2]

    @property
    def data_size(self) -> int:
        return comm.get_world_size() // self._own_sizes()[2]

    @property
    def averages(self) -> bool:  # type: ignore[override]
        return self.data_size > 1

    @property
    def shards_weights(self) -> bool:  # type: ignore[override]
        return self._own_sizes()[0] < comm.get_world_size() or self._needs_shards

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        replicate, shard, tensor = self._own_sizes()
        if comm.get_world_size() == 1:
            logger.info("PARALLEL.NAME: mesh does not split the model, as there is a single process")
            return model
        if replicate == comm.get_world_size() and not self._needs_shards:
            return DDP().wrap(model, device)
        share_weights(model)
        mesh = _device_mesh(device, (replicate, shard, tensor))
        if tensor > 1:
            self._tensor_mesh = mesh["tensor"]
            parallelize(model, self._tensor_mesh, find_plan(self.plan, model))
        # With 1 x 1 ranks too, so that all parameters are of one kind, which optimizers need, and gradients are whole.
        return self._shard(model, mesh["replicate", "shard"] if replicate > 1 else mesh["shard"], device)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:  # type: ignore[override]
        return model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) else super().no_sync(model)

    def before_evaluation(self, model: nn.Module) -> None:
        super().before_evaluation(model)
        if self._tensor_mesh is None:
            return
        whole = {name: one for name, one in model.named_parameters() if not splits(one, "tensor")}
        if differing := differing_copies(whole, self._tensor_mesh.get_group()):
            logger.warning(
                "PARALLEL.ARGS.plan: a parameter that is whole on the ranks of the dimension tensor is not the same on "
                "all: %s. Is it used between a colwise and a rowwise layer, where each rank has a part? Then its "
                "gradient is a part too; compute with it outside",
                differing[0],
            )

    def _own_sizes(self) -> tuple[int, int, int]:
        ranks = comm.get_world_size()
        return self.sizes(ranks) if ranks > 1 else (1, 1, 1)


def _device_mesh(device: torch.device, sizes: tuple[int, int, int]) -> "DeviceMesh":
    """Return the DeviceMesh of all ranks. init_device_mesh() would create groups with torch's timeout."""
    from torch.distributed.device_mesh import DeviceMesh

    grid = torch.arange(comm.get_world_size()).view(sizes)
    groups = []
    for dim in range(len(sizes)):
        for ranks in grid.movedim(dim, -1).reshape(-1, sizes[dim]).tolist():
            group = comm.new_group(ranks)  # every rank calls it for every group
            if comm.get_rank() in ranks:
                groups.append(group)
    return DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=_DIMS)
