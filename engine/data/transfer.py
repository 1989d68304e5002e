"""Move a batch to a device."""

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from ...hooks.common.batches import fields_of, with_fields

__all__ = ["move_to_device"]


def move_to_device(batch: Any, device: torch.device | str) -> Any:
    """Move every tensor in a batch to a device.

    Copies to CUDA do not block: later work on the same stream waits for them. Copies in other directions block, since
    the host could read a tensor before it has arrived.

    Args:
        batch: tensors, objects with a method ``to``, and dicts, lists, tuples, named tuples and dataclasses of these.
            Other values (strings, numbers) are kept.
        device: the target device.

    Returns:
        The same structure. Tensors that are already on the device are not copied.
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
        moved = copy.copy(batch)  # keeps the type and other attributes
        for key, value in batch.items():
            moved[key] = _move(value, device, non_blocking)
        return moved
    if (named := fields_of(batch)) is not None:
        return with_fields(batch, {name: _move(value, device, non_blocking) for name, value in named.items()})
    if isinstance(batch, Mapping):
        return {key: _move(value, device, non_blocking) for key, value in batch.items()}
    return batch
