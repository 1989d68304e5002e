"""The number of samples in a batch of any form."""

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

__all__ = ["fields_of", "is_samples", "samples_in", "with_fields"]


def samples_in(batch: Any) -> int | None:
    """Return the number of samples in a batch.

    Args:
        batch: tensors in any nesting of tuples, lists, dicts and dataclasses, or a list of samples.

    Returns:
        The first dimension of the first tensor, or the length of the list of samples; None if there is neither.
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else None
    if is_samples(batch):
        return len(batch)
    if (named := fields_of(batch)) is not None:
        children = list(named.values())
    elif isinstance(batch, Mapping):
        children = list(batch.values())
    elif isinstance(batch, list | tuple):
        children = list(batch)
    else:
        return None
    return next((size for size in map(samples_in, children) if size is not None), None)


def is_samples(batch: Any) -> bool:
    """Return whether a batch is a list of samples, not a list of fields with tensors over all samples."""
    return isinstance(batch, list) and not any(isinstance(child, torch.Tensor) for child in batch)


def fields_of(batch: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass by name; None for anything else, also for a mapping that is a dataclass."""
    if not is_dataclass(batch) or isinstance(batch, type | Mapping):
        return None
    return {field.name: getattr(batch, field.name) for field in fields(batch)}


def with_fields(batch: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass with other values of its fields."""
    changed = copy.copy(batch)
    for name, value in values.items():
        object.__setattr__(changed, name, value)  # the dataclass may be frozen
    return changed
