"""Passes over loaders: faster for DataLoaders without workers, and complete ones, where ending early is an error."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .reading import batch_reader, make_batch, read_sample

__all__ = ["ended_early", "exact_length", "iterate", "whole_pass"]


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


def whole_pass(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield each batch of a loader once.

    Raises:
        RuntimeError: the loader ended before its length, or something in it called ``sys.exit()``.
    """
    length, read, batches = exact_length(loader), 0, iterate(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except SystemExit as error:
            raise RuntimeError(f"the data loader called sys.exit({error.code!r}) after {read} batches") from error
        read += 1
        yield batch
    if length is not None and read < length:
        raise ended_early(read, length)


def exact_length(loader: Any) -> int | None:
    """Number of batches of a pass, or None if unknown.

    The length of a loader over an IterableDataset is only an estimate: workers may split the data unevenly.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    try:
        return len(loader)
    except TypeError:  # a generator, an endless sampler
        return None


def ended_early(read: int, length: int) -> RuntimeError:
    """The error for a loader that ends before its length."""
    return RuntimeError(
        f"the data loader ended after {read} of its {length} batches: a StopIteration was raised in its data set, "
        "collate function or sampler, or its len() is too large"
    )
