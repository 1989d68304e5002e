"""Helpers for sharded tensors (torch's DTensor) that do not import ``torch.distributed.tensor``."""

from typing import Any

import torch
from torch import nn

__all__ = ["has_shards", "is_sharded", "local_part"]


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
