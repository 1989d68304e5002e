"""Moving a batch to a device."""

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

__all__ = ["move_to_device"]


def move_to_device(batch: Any, device: torch.device | str) -> Any:
    """Move every tensor in a batch to a device, without waiting where that is safe.

    Copies to CUDA do not block: later work on the same stream waits for them, and pinned memory makes them overlap
    with computing. In other directions the host would read a tensor that has not arrived, so those copies block.

    Args:
        batch: tensors, objects with a method ``to``, and dicts, lists, tuples and named tuples of these, nested.
            Anything else (strings, numbers) stays as it is.
        device: where to.

    Returns:
        The same structure; what is there already is not copied.
    """
    device = torch.device(device)
    return _move(batch, device, device.type == "cuda")


def _move(batch: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, tuple):
        items = [_move(item, device, non_blocking) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list):
        return [_move(item, device, non_blocking) for item in batch]
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)  # keeps the type and whatever else it holds
        for key, value in batch.items():
            moved[key] = _move(value, device, non_blocking)
        return moved
    if isinstance(batch, Mapping):
        return {key: _move(value, device, non_blocking) for key, value in batch.items()}
    return batch
