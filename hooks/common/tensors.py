"""Batches of any form, and sharded tensors (torch's DTensor), without importing ``torch.distributed.tensor``."""

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

__all__ = [
    "class_names_of",
    "convert",
    "fields_of",
    "gathered",
    "has_shards",
    "is_samples",
    "is_sharded",
    "local_part",
    "samples_in",
    "shard_like",
    "with_fields",
]


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")


def has_shards(model: nn.Module) -> bool:
    """Return whether a model's parameters are sharded over the ranks."""
    return any(map(is_sharded, model.parameters()))


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, with the same storage; other tensors unchanged."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def shard_like(whole: torch.Tensor, one: Any) -> Any:
    """Return a tensor that is the same on all ranks with the shards of ``one``. Ranks exchange nothing."""
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(one.device_mesh.device_type)
    return distribute_tensor(whole, one.device_mesh, one.placements, src_data_rank=None)


def gathered(tensor: Any) -> Any:
    """Gather a sharded tensor on all ranks, which call this together; return anything else unchanged."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def class_names_of(dataset: Any) -> list[str]:
    """Return ``classes`` of a data set, such as an ``ImageFolder``, also in a ``Subset`` or a loader; or []."""
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", ())
    return list(map(str, names)) if isinstance(names, Sequence) else []


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


def convert(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a batch of the same structure with other values.

    Args:
        batch: values in dicts, lists, tuples, named tuples and dataclasses.
        leaf: returns the new value for a tensor or another part; None: its parts are converted, or it is kept.
    """
    if (new := leaf(batch)) is not None:
        return new
    if isinstance(batch, tuple):
        items = [convert(item, leaf) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list):
        return [convert(item, leaf) for item in batch]
    if type(batch) is dict:
        return {key: convert(value, leaf) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)  # keeps the type and other attributes
        for key, value in batch.items():
            changed[key] = convert(value, leaf)
        return changed
    if (named := fields_of(batch)) is not None:
        return with_fields(batch, {name: convert(value, leaf) for name, value in named.items()})
    if isinstance(batch, Mapping):
        return {key: convert(value, leaf) for key, value in batch.items()}
    return batch
