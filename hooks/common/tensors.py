"""Helpers for sharded tensors (torch's DTensor) that do not import ``torch.distributed.tensor``."""

from typing import Any

import torch
from torch import nn

__all__ = ["gathered", "has_shards", "is_sharded", "local_part", "shard_like"]


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")


def has_shards(model: nn.Module) -> bool:
    """Return whether a model's parameters are sharded over the ranks."""
    return any(map(is_sharded, model.parameters()))


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, with the same storage; other tensors unchanged."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def shard_like(whole: torch.Tensor, one: Any) -> Any:
    """Return a tensor that is the same on all ranks with the shards of ``one``. Ranks exchange nothing."""
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(one.device_mesh.device_type)
    return distribute_tensor(whole, one.device_mesh, one.placements, src_data_rank=None)


def gathered(tensor: Any) -> Any:
    """Gather a sharded tensor on all ranks, which call this together; return anything else unchanged."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
