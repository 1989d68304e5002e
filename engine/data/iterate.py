"""A faster iterator for DataLoaders without workers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .reading import batch_reader, make_batch, read_sample

__all__ = ["iterate"]


def iterate(loader: Any) -> Iterator[Any]:
    """``iter(loader)``, with a plain loop for a DataLoader without workers. The batches are the same."""
    if (
        type(loader) is not DataLoader
        or loader.num_workers
        or loader.pin_memory
        or isinstance(loader.dataset, IterableDataset)
        or torch.autograd._profiler_enabled()
    ):
        return iter(loader)
    indices = iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    # iter() draws a seed for its workers here. Draw it too, so that later random numbers are the same.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    return _read(loader, indices if loader.batch_sampler is not None else ([index] for index in indices))


def _read(loader: "DataLoader[Any]", batches: Iterator[list[Any]]) -> Iterator[Any]:
    dataset, collate = loader.dataset, loader.collate_fn
    fetch = batch_reader(dataset)
    if loader.batch_sampler is None:  # each item of the data set is a batch

        def fetch(one: list[Any]) -> Any:
            return read_sample(dataset, one[0])

    for indices in batches:
        try:
            made = [make_batch(dataset, fetch, collate, indices)]
        except StopIteration:  # the caller reports that the data ended early
            return
        yield made.pop()  # this frame keeps no batch alive
