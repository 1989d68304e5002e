"""Complete passes over a loader: ending early is an error."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from .iterate import iterate

__all__ = ["ended_early", "exact_length", "whole_pass"]


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
