"""The number of samples in a batch of any form."""

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["is_samples", "samples_in"]


def samples_in(batch: Any) -> int | None:
    """Return the number of samples in a batch.

    Args:
        batch: tensors in any nesting of tuples, lists and dicts, or a list of samples.

    Returns:
        The first dimension of the first tensor, or the length of the list of samples; None if there is neither.
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else None
    if is_samples(batch):
        return len(batch)
    if isinstance(batch, Mapping):
        children = list(batch.values())
    elif isinstance(batch, list | tuple):
        children = list(batch)
    else:
        return None
    return next((size for size in map(samples_in, children) if size is not None), None)


def is_samples(batch: Any) -> bool:
    """Return whether a batch is a list of samples, not a list of fields with tensors over all samples."""
    return isinstance(batch, list) and not any(isinstance(child, torch.Tensor) for child in batch)
