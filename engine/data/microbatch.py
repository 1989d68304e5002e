"""Cutting a batch in parts, for gradient accumulation."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["batch_size_of", "split_batch"]


def batch_size_of(batch: Any) -> int:
    """Number of samples in a batch: the first dimension of the first tensor in it, or the length of a list of samples.

    Raises:
        TypeError: no tensor and no list is found in it.
    """
    size = _size(batch)
    if size is None:
        raise TypeError(f"cannot tell the number of samples of a batch of type {type(batch).__name__}")
    return size


def split_batch(batch: Any, parts: int) -> Iterator[tuple[Any, float]]:
    """Cut a batch in ``parts`` of nearly equal size.

    Args:
        batch: tensors whose first dimension is the batch, in any nesting of tuples, lists and dicts; or a list of
            samples of any kind.
        parts: how many; fewer come back if there are fewer samples.

    Returns:
        Pairs of a part and its share of the samples; the shares add up to 1.
    """
    size = batch_size_of(batch)
    for part in range(min(parts, size)):
        start, end = size * part // min(parts, size), size * (part + 1) // min(parts, size)
        yield _cut(batch, start, end, size), (end - start) / size


def _size(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, Mapping):
        children = list(batch.values())
    elif isinstance(batch, list | tuple):
        children = list(batch)
    else:
        return None
    if _is_samples(batch):
        return len(batch)
    sizes = (_size(child) for child in children)
    return next((size for size in sizes if size is not None), None)


def _is_samples(batch: Any) -> bool:
    """Whether it is a list of samples, as against a list of fields, some of which are tensors over all samples."""
    return isinstance(batch, list) and not any(isinstance(child, torch.Tensor) for child in batch)


def _cut(batch: Any, start: int, end: int, size: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[start:end] if batch.ndim and batch.shape[0] == size else batch
    if isinstance(batch, Mapping):
        return {key: _cut(value, start, end, size) for key, value in batch.items()}
    if _is_samples(batch):
        return batch[start:end]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut(value, start, end, size) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_cut(value, start, end, size) for value in batch)
    return batch
