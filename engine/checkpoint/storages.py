"""The memory that the tensors of a state stand in, which is what a file holds."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MemoryKey", "compact", "memory_of", "replace_tensors", "tensors_in"]

MemoryKey = tuple[torch.device, int]
"""A piece of memory: the device, and the address there."""

# A tensor is copied out of its memory when more than this part of the memory is of no use.
_WASTE = 0.1


def tensors_in(data: Any) -> list[torch.Tensor]:
    """All tensors in plain data, in order."""
    found: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                collect(item)
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    collect(data)
    return found


def replace_tensors(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Plain data with ``function(tensor)`` in place of each tensor; ``data`` itself stays as it is."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, dict):
        return {key: replace_tensors(item, function) for key, item in data.items()}
    if type(data) in (list, tuple):  # torch.Size is a tuple too, of nothing to replace
        return type(data)(replace_tensors(item, function) for item in data)
    return data


def memory_of(tensor: torch.Tensor) -> MemoryKey | None:
    """Which memory a tensor is a view of; None if it has none, or more than one piece of it (as a sparse one)."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    storage = tensor.untyped_storage()
    return (tensor.device, storage.data_ptr()) if storage.nbytes() else None


def compact(data: Any) -> Any:
    """Plain data whose tensors take along no more memory than they show.

    A file holds the whole memory of every tensor, once. So a small view of a large tensor is replaced by a copy, as
    are views of one memory as different types, which torch.save refuses. Tensors that are the same stay the same.
    """
    groups: dict[MemoryKey, dict[Any, torch.Tensor]] = {}
    for tensor in tensors_in(data):
        key = memory_of(tensor)
        if key is not None:
            groups.setdefault(key, {}).setdefault(_view(tensor), tensor)
    copies: dict[MemoryKey, dict[Any, torch.Tensor]] = {
        key: {view: tensor.clone() for view, tensor in views.items()}
        for key, views in groups.items()
        if _wasteful(list(views.values()))
    }
    if not copies:
        return data

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        key = memory_of(tensor)
        return copies[key][_view(tensor)] if key in copies else tensor

    return replace_tensors(data, replaced)


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def _wasteful(views: list[torch.Tensor]) -> bool:
    if len({view.dtype for view in views}) > 1:
        return True
    used = sum(view.numel() * view.element_size() for view in views)
    return used < (1 - _WASTE) * views[0].untyped_storage().nbytes()
