"""A copy of a run's state in memory, so that training can go on while the state of now is written."""

import logging
import mmap
from contextlib import suppress
from typing import Any

import torch

from .storages import MemoryKey, memory_of, replace_tensors, tensors_in

__all__ = ["Staging"]

logger = logging.getLogger(__name__)

_ALIGNMENT = 64


class Staging:
    """Copies states, one after the other, into memory that is kept for the next.

    Tensors on a GPU are copied into pinned memory, on the current stream. The steps to come queue up behind that: the
    host does not wait, and no weight changes before it was copied. :meth:`wait` tells when all has arrived. From
    other devices copying waits.
    """

    def __init__(self) -> None:
        self._memory: _Memory | None = None
        self._arriving: list[torch.cuda.Event] = []

    def copy(self, data: Any) -> Any:
        """A copy of plain data and tensors, these on the CPU. The one before must not be in use any more.

        Tensors that share memory do so in the copy.
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
            self._arriving.append(event)
        return data

    def wait(self) -> None:
        """Wait until all of the last copy has arrived."""
        for event in self._arriving:
            event.synchronize()
        self._arriving.clear()

    def free(self) -> None:
        """Give the memory back; no copy must be in use any more."""
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
    """A piece of the host's memory, in which tensors can be placed that each have a storage of their own.

    Args:
        size: in bytes.
        pinned: whether to have GPUs copy to it directly.
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
        """Bytes (size,), from ``offset`` on."""
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=size, offset=offset)

    def unpin(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.tensor(0, 1).data_ptr())
            self._registered = False


def _allocate(size: int) -> Any:
    if not hasattr(mmap, "MADV_DONTFORK"):
        return mmap.mmap(-1, size)
    # In large pages it is there four times sooner. Worker processes of a loader must not inherit it: every page that
    # changes after they started would then be there twice.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with suppress(AttributeError, OSError):  # the system has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _room(storage: torch.UntypedStorage) -> int:
    """The size of a copy, such that the next one is aligned, too."""
    return -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
