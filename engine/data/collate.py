"""Functions that make a batch from a list of samples: ``DATALOADER.COLLATE_FN``."""

import functools
import inspect
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from ...config import CfgNode, Registry
from .datasets import ArrayDataset
from .seeding import own_collate_fn

__all__ = ["COLLATE_REGISTRY", "build_collate_fn", "check_collate_fn", "pad_collate", "trivial_batch_collator"]

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


_KEY = "DATALOADER.COLLATE_FN.ARGS"


def check_collate_fn(cfg: CfgNode) -> Any:
    """Check the name and arguments of ``cfg.DATALOADER.COLLATE_FN``, and return what is named; None if it is not set.

    Raises:
        ConfigError: they are wrong.
    """
    name, args = cfg.DATALOADER.COLLATE_FN.NAME, cfg.DATALOADER.COLLATE_FN.ARGS
    if not name:
        return None
    target = COLLATE_REGISTRY.get(name, "DATALOADER.COLLATE_FN.NAME")
    COLLATE_REGISTRY.check(name, args, positional=0 if inspect.isclass(target) else 1, key=_KEY)
    return target


def build_collate_fn(cfg: CfgNode, dataset: Any) -> Callable[[Any], Any] | None:
    """Return the collate function of ``cfg.DATALOADER.COLLATE_FN`` for a data set; None if it is not set.

    It gets a list of samples, also if the data set is an :class:`ArrayDataset`, which returns whole batches.
    """
    target = check_collate_fn(cfg)
    if target is None:
        return None
    args = dict(cfg.DATALOADER.COLLATE_FN.ARGS)
    if inspect.isclass(target):
        collate = COLLATE_REGISTRY.build(cfg.DATALOADER.COLLATE_FN.NAME, args, key=_KEY)
    else:
        collate = functools.partial(target, **args) if args else target
    if own_collate_fn(dataset) is ArrayDataset.collate_fn:
        return functools.partial(_collate_rows, collate)
    return collate


def _collate_rows(collate: Callable[[list[Any]], Any], batch: tuple[torch.Tensor, ...]) -> Any:
    return collate(list(zip(*batch, strict=True)))
