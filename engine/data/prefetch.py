"""Copy the next batch to the GPU during the computation on the current one."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .transfer import move_to_device

__all__ = ["CudaPrefetcher"]


class CudaPrefetcher:
    """Reads one batch ahead and copies it on a separate CUDA stream.

    Only for batches from worker processes: reading ahead in this process would draw random numbers too early for an
    exact resume. Copies overlap with computing only from pinned memory.

    Args:
        batches: in host memory.
        device: a CUDA device.
        snapshot: returns the state of the loader; called after each batch is read.

    Attributes:
        state: the state after the last batch that was returned.
    """

    def __init__(self, batches: Iterator[Any], device: torch.device, snapshot: Callable[[], Any] | None = None) -> None:
        self._batches = batches
        self._device = device
        self._snapshot = snapshot
        self.state: Any = None if snapshot is None else snapshot()
        self._next_state: Any = None
        self._stream = torch.cuda.Stream(device)
        self._next: Any = None
        self._ended = False
        self._error: Exception | None = None
        self._load()

    def __iter__(self) -> "CudaPrefetcher":
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._ended:
            raise StopIteration
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        batch, self.state = self._next, self._next_state
        # Its memory belongs to the copying stream, which must not reuse it before computing has finished.
        _record(batch, computing)
        self._load()
        return batch

    def _load(self) -> None:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._ended, self._next = True, None
            return
        except Exception as error:  # of the next step
            self._ended, self._next, self._error = True, None, error
            return
        if self._snapshot is not None:
            self._next_state = self._snapshot()
        with torch.cuda.stream(self._stream):
            self._next = move_to_device(batch, self._device)


def _record(batch: Any, stream: Any) -> None:
    if isinstance(batch, torch.Tensor):
        batch.record_stream(stream)
    elif isinstance(batch, dict):
        _record(list(batch.values()), stream)
    elif isinstance(batch, list | tuple):
        for item in batch:
            _record(item, stream)
