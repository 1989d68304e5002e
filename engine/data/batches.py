"""Batches: made from samples, split into micro-batches, moved to a device."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from ...config import Registry
from ...hooks.common.tensors import convert, is_samples, samples_in

_END: Any = object()

COLLATE_REGISTRY = Registry("COLLATE", Callable)
"""Functions from a list of samples to a batch, or classes of callable objects, for ``DATALOADER.COLLATE_FN.NAME``."""

COLLATE_REGISTRY.register(default_collate)


@COLLATE_REGISTRY.register()
def trivial_batch_collator(batch: list[Any]) -> list[Any]:
    """Return the list of samples unchanged."""
    return batch


@COLLATE_REGISTRY.register()
def pad_collate(samples: list[Any], padding: Any = 0) -> Any:
    """Make a batch of sequences of different lengths: they are padded at the end to the longest one.

    Sequences are tensors, NumPy arrays and lists of numbers. Everything else is collated as usual.

    Args:
        samples: sequences, numbers and strings, alone or in dicts or tuples.
        padding: the number that fills up tensors; for dicts, also ``{entry: number}``, with 0 for other entries.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        fill = padding if isinstance(padding, Mapping) else dict.fromkeys(first, padding)
        return {key: pad_collate([sample[key] for sample in samples], fill.get(key, 0)) for key in first}
    if isinstance(first, list) and all(isinstance(value, float | int) for sample in samples for value in sample):
        dtype = torch.tensor(list(chain(*samples))).dtype
        samples = [torch.tensor(sample, dtype=dtype) for sample in samples]
    elif isinstance(first, list | tuple):
        return tuple(pad_collate(list(values), padding) for values in zip(*samples, strict=True))
    if isinstance(samples[0], torch.Tensor | np.ndarray) and samples[0].ndim:
        return pad_sequence(list(map(torch.as_tensor, samples)), batch_first=True, padding_value=padding)
    return default_collate(samples)


def batch_size_of(batch: Any) -> int:
    """Number of samples in a batch: the first dimension of its first tensor, or the length of a list of samples.

    Raises:
        TypeError: the batch has no tensor and no list.
    """
    size = samples_in(batch)
    if size is None:
        raise TypeError(f"cannot tell the number of samples of a batch of type {type(batch).__name__}")
    return size


def split_batch(batch: Any, parts: int, *, exact: bool = False) -> Iterator[tuple[Any, float]]:
    """Split a batch into ``parts`` of nearly equal size.

    Args:
        batch: tensors whose first dimension is the batch, in any nesting of tuples, lists, dicts and dataclasses; or a
            list of samples of any kind.
        parts: number of parts; fewer if there are fewer samples.
        exact: repeat the last part with a share of 0 up to ``parts``, for ranks that must have the same number of
            parts.

    Returns:
        Pairs of a part and its share of the samples. The shares add up to 1.
    """
    size = batch_size_of(batch)
    for part in range(min(parts, size)):
        start, end = size * part // min(parts, size), size * (part + 1) // min(parts, size)
        piece = convert(batch, partial(_rows, start, end, size))
        yield piece, (end - start) / size
    if exact and size:
        for _ in range(parts - size):
            yield piece, 0.0


def _rows(start: int, end: int, size: int, part: Any) -> Any:
    """Rows of a tensor over all samples, or samples of a list; None for another part of a batch."""
    if isinstance(part, torch.Tensor):
        return part[start:end] if part.ndim and part.shape[0] == size else part
    return part[start:end] if is_samples(part) else None


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

    def __init__(
        self, batches: Iterator[Any], device: torch.device, snapshot: Callable[[], Any] = lambda: None
    ) -> None:
        self._batches = batches
        self._device = device
        self._snapshot = snapshot
        self.state = self._next_state = snapshot()
        self._stream = torch.cuda.Stream(device)
        self._error: Exception | None = None
        self._load()

    def __iter__(self) -> "CudaPrefetcher":
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        if self._next is _END:
            raise StopIteration
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        batch, self.state = self._next, self._next_state
        # Its memory belongs to the copying stream, which must not reuse it before computing has finished.
        convert(batch, lambda part: _record(part, computing))
        self._load()
        return batch

    def _load(self) -> None:
        self._next = _END
        try:
            batch = next(self._batches, _END)
        except Exception as error:  # of the next step
            self._error = error
            return
        self._next_state = self._snapshot()
        if batch is not _END:
            with torch.cuda.stream(self._stream):
                self._next = move_to_device(batch, self._device)


def _record(part: Any, stream: Any) -> Any:
    if isinstance(part, torch.Tensor):
        part.record_stream(stream)
        return part
    return None
