"""What can be told of a batch of any form."""

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["is_samples", "samples_in"]


def samples_in(batch: Any) -> int | None:
    """Number of samples in a batch: the first dimension of the first tensor in it, or the length of a list of samples.

    Args:
        batch: tensors in any nesting of tuples, lists and dicts, or a list of samples of any kind.

    Returns:
        The number; None if there is neither a tensor nor a list in it.
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
    """Whether it is a list of samples, as against a list of fields, some of which are tensors over all samples."""
    return isinstance(batch, list) and not any(isinstance(child, torch.Tensor) for child in batch)
