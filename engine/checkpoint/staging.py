"""Copies of a run's state in memory: smaller ones for the file, and one to write while training continues."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["MemoryKey", "Staging", "compact", "memory_of", "replace_tensors", "tensors_in"]

# A tensor is copied when more than this part of its memory is unused.
_WASTE = 0.1


MemoryKey = tuple[torch.device, int]
"""Identifies memory: the device, and the address there."""


def tensors_in(data: Any) -> list[torch.Tensor]:
    """Return all tensors in plain data, in order."""
    return [leaf for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor)]


def replace_tensors(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of plain data with ``function(tensor)`` in place of each tensor."""
    return tree_map_only(torch.Tensor, function, data)


def memory_of(tensor: torch.Tensor) -> MemoryKey | None:
    """Return which memory a tensor is a view of; None if it has none or several, as sparse tensors do."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    storage = tensor.untyped_storage()
    return (tensor.device, storage.data_ptr()) if storage.nbytes() else None


def compact(data: Any) -> Any:
    """Copy the tensors in plain data that would make its file larger than needed.

    ``torch.save`` writes the whole memory of each tensor, once. A small view of a large tensor is replaced by a copy.
    Views of the same memory as different types are copied too: ``torch.save`` refuses them. Tensors that are the same
    stay the same.
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


class Staging:
    """Copies a state into host memory, which is kept for the next copy.

    Tensors on a GPU are copied into pinned memory on the current stream. The host does not wait, and later steps on
    the stream change no weight before it is copied. :meth:`wait` waits for the copies. Copies from other devices are
    synchronous.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, torch.Tensor] = {}
        self._pending: list[torch.cuda.Event] = []

    def copy(self, data: Any) -> Any:
        """Return a copy with tensors on the CPU. The previous copy must not be in use.

        Tensors that share memory share it in the copy too.
        """
        earlier, self._kept = self._kept, {}
        copies: dict[MemoryKey, torch.UntypedStorage] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            key = memory_of(tensor)
            if key is None:
                return tensor.to("cpu", copy=True)
            if key not in copies:
                content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                place = len(copies), len(content), tensor.is_cuda
                room = earlier.pop(place, None)
                if room is None:
                    room = torch.empty(len(content), dtype=torch.uint8, pin_memory=tensor.is_cuda)
                self._kept[place] = room.copy_(content, non_blocking=tensor.is_cuda)
                copies[key] = room.untyped_storage()
            same = torch.empty(0, dtype=tensor.dtype)
            return same.set_(copies[key], tensor.storage_offset(), tensor.size(), tensor.stride())

        data = replace_tensors(data, copied)
        for device in {device for device, _ in copies if device.type == "cuda"}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._pending.append(event)
        return data

    def wait(self) -> None:
        """Wait until the last copy is complete."""
        for event in self._pending:
            event.synchronize()
        self._pending.clear()

    def free(self) -> None:
        """Free the memory; no copy must be in use."""
        self.wait()
        self._kept.clear()
