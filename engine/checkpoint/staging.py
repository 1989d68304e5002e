"""Copies of a run's state in memory: smaller ones for the file, and one to write while training continues."""

import logging
import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

__all__ = ["MemoryKey", "Staging", "compact", "memory_of", "replace_tensors", "tensors_in"]

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
# A tensor is copied when more than this part of its memory is unused.
_WASTE = 0.1


MemoryKey = tuple[torch.device, int]
"""Identifies memory: the device, and the address there."""


def tensors_in(data: Any) -> list[torch.Tensor]:
    """Return all tensors in plain data, in order."""
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
    """Return a copy of plain data with ``function(tensor)`` in place of each tensor."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, dict):
        return {key: replace_tensors(item, function) for key, item in data.items()}
    if type(data) in (list, tuple):  # torch.Size is a tuple too, without tensors
        return type(data)(replace_tensors(item, function) for item in data)
    return data


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
        self._memory: _Memory | None = None
        self._pending: list[torch.cuda.Event] = []

    def copy(self, data: Any) -> Any:
        """Return a copy with tensors on the CPU. The previous copy must not be in use.

        Tensors that share memory share it in the copy too.
        """
        tensors = tensors_in(data)
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        sizes: dict[MemoryKey, int] = {}
        for tensor in tensors:
            key = memory_of(tensor)
            if key is not None:
                sizes[key] = _room(tensor.untyped_storage())
        memory = self._reserve(sum(sizes.values()), pinned=bool(devices))
        copies: dict[MemoryKey, torch.UntypedStorage] = {}
        used = 0

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal used
            key = memory_of(tensor)
            if key is None:
                return tensor.to("cpu", copy=True)
            if key not in copies:
                content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                place = memory.tensor(used, len(content))
                place.copy_(content, non_blocking=tensor.is_cuda)
                copies[key] = place.untyped_storage()
                used += sizes[key]
            same = torch.empty(0, dtype=tensor.dtype)
            return same.set_(copies[key], tensor.storage_offset(), tensor.size(), tensor.stride())

        data = replace_tensors(data, copied)
        for device in devices:
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
        if self._memory is not None:
            self._memory.unpin()
            self._memory = None

    def _reserve(self, size: int, pinned: bool) -> "_Memory":
        memory = self._memory
        if memory is None or not size <= memory.size <= 2 * size or memory.pinned < pinned:
            self.free()
            memory = self._memory = _Memory(max(size, _ALIGNMENT), pinned)
        return memory


class _Memory:
    """A block of host memory for tensors that each have their own storage.

    Args:
        size: in bytes.
        pinned: pin it, so that GPUs copy to it directly.
    """

    def __init__(self, size: int, pinned: bool) -> None:
        self.size = size
        self.pinned = pinned
        self._buffer = _allocate(size)
        self._registered = False
        if pinned:
            status = int(torch.cuda.cudart().cudaHostRegister(self.tensor(0, 1).data_ptr(), size, 1))
            self._registered = status == 0
            if status:
                logger.warning("Cannot pin %d MB of memory (CUDA error %d): saving will be slower", size >> 20, status)

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        """Return a uint8 tensor of shape (size,) that starts at ``offset``."""
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=size, offset=offset)

    def unpin(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.tensor(0, 1).data_ptr())
            self._registered = False


def _allocate(size: int) -> Any:
    if not hasattr(mmap, "MADV_DONTFORK"):
        return mmap.mmap(-1, size)
    # Large pages make the first copy four times faster. Loader workers must not inherit the memory: each page that
    # changes after they start would be duplicated.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with suppress(AttributeError, OSError):  # not supported by the system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _room(storage: torch.UntypedStorage) -> int:
    """Return the size of a copy, rounded up so that the next one is aligned."""
    return -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
