"""Move a batch to a device."""

from typing import Any

import torch

from ...hooks.common.tensors import convert

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
    non_blocking = device.type == "cuda"

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=non_blocking)
        return value.to(device) if hasattr(value, "to") else None

    return convert(batch, move)
