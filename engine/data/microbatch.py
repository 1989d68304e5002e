"""Split a batch into micro-batches, for gradient accumulation."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...hooks.common.tensors import fields_of, is_samples, samples_in, with_fields

__all__ = ["batch_size_of", "split_batch"]


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
        piece = _cut(batch, start, end, size)
        yield piece, (end - start) / size
    if exact and size:
        for _ in range(parts - size):
            yield piece, 0.0


def _cut(batch: Any, start: int, end: int, size: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[start:end] if batch.ndim and batch.shape[0] == size else batch
    if (named := fields_of(batch)) is not None:
        return with_fields(batch, {name: _cut(value, start, end, size) for name, value in named.items()})
    if isinstance(batch, Mapping):
        return {key: _cut(value, start, end, size) for key, value in batch.items()}
    if is_samples(batch):
        return batch[start:end]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut(value, start, end, size) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_cut(value, start, end, size) for value in batch)
    return batch
