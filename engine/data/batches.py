"""Make batches of samples, count their samples, and cut them into micro-batches."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import is_dataclass
from functools import partial
from itertools import chain, repeat
from operator import is_not
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from ...config import Registry
from ...config.errors import MismatchError
from ...hooks.common import convert, fields_of, may_be_samples, samples_in
from ..modeling.clear_errors import describe

CollateFn: TypeAlias = Callable[[Any], Any]
SizedBatch: TypeAlias = tuple[Any, int | None]
"""A batch or micro-batch, and its number of samples; None if that is not known."""

COLLATE_REGISTRY = Registry("COLLATE", Callable, function_of=1)
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
        samples: N sequences (length, ...), numbers and strings, alone or in dicts or tuples.
        padding: the number that fills up tensors; for dicts, also ``{entry: number}``, with 0 for other entries.

    Returns:
        The structure of one sample. Sequences are tensors (N, longest length, ...), numbers are tensors (N,).
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


def batch_size_of(batch: Any, read: int | None = None) -> int:
    """Return the number of samples in a batch; see :func:`~hookline.hooks.common.samples_in`.

    Raises:
        MismatchError: it is not known.
    """
    size = samples_in(batch, read)
    if size is None:
        raise MismatchError(
            f"cannot tell the number of samples in a batch, which is {describe(batch)}. Let its collate function state "
            'it, as an attribute num_samples of the batch or an entry "num_samples" of a dict; or read a data set or a '
            "DataLoader, which know the number"
        )
    return size


def split_batch(batch: Any, parts: int, read: int | None = None) -> Iterator[tuple[Any, int]]:
    """Cut a batch, whose samples are collated already, into ``parts`` of nearly equal size.

    Args:
        batch: tensors (N, ...) and lists of samples, in any nesting of tuples, dicts and dataclasses. Numbers, strings
            and tensors () are in each part.
        parts: number of parts; fewer if there are fewer samples.
        read: the number of samples, if it is known.

    Returns:
        Pairs of a part, with tensors (n, ...) for tensors (N, ...), and its number of samples n.

    Raises:
        MismatchError: the number of samples is not known, or a part of the batch does not have one entry for each.
    """
    size = batch_size_of(batch, read)
    if size < 2:
        yield batch, size
        return
    for piece in cut(range(size), parts):
        part = convert(batch, partial(_rows, slice(piece.start, piece.stop), size))
        if isinstance(part, MutableMapping) and "num_samples" in part:  # it stated that of the whole batch
            part["num_samples"] = len(piece)
        elif hasattr(part, "num_samples") and is_dataclass(part):
            object.__setattr__(part, "num_samples", len(piece))
        yield part, len(piece)


def _rows(rows: slice, size: int, part: Any) -> Any:
    """Return rows of a tensor over all samples or of a list of samples, or a constant; None for a container."""
    if part is None or isinstance(part, str | bytes | float | int | complex):
        return part
    if isinstance(part, torch.Tensor | np.ndarray):
        if not part.ndim:
            return part
        if len(part) == size:
            return part[rows]
    elif isinstance(part, list):
        of_samples = may_be_samples(part) and len(part) == size
        of_fields = any(isinstance(one, torch.Tensor) and one.ndim and len(one) == size for one in part)
        if of_samples != of_fields:
            return part[rows] if of_samples else None
    elif isinstance(part, tuple | Mapping) or fields_of(part):
        return None
    raise MismatchError(
        f"a batch of {size} samples cannot be cut into micro-batches: not each part of it has one entry per sample, as "
        f"{describe(part)}. Train on a data set or a DataLoader, whose samples are collated in micro-batches"
    )


def cut(samples: Any, parts: int) -> list[Any]:
    """Cut a sequence into ``parts`` of nearly equal size; fewer if it is shorter."""
    if parts == 1:
        return [samples]
    size = len(samples)
    parts = min(parts, size)
    return [samples[size * part // parts : size * (part + 1) // parts] for part in range(parts)]


def present(samples: Any) -> int:
    """Return the number of samples that are not None, which a collate function leaves out."""
    return sum(map(is_not, samples, repeat(None)))
