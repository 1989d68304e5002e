"""The indices of the samples that a loader reads: kept for hooks."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ...config import ConfigError
from .iterate import iterate
from .stream import has_state
from .workers import swapped

__all__ = ["IndexStream", "reason_without_indices"]


class IndexStream:
    """Stands in for a loader's batch sampler, and keeps the indices of each batch until the batch is read.

    A DataLoader returns batches in the order of their indices, however many its workers read ahead.

    Args:
        loader: a DataLoader of a map-style data set.

    Attributes:
        current: the indices of the last batch; None if they are not known.

    Raises:
        ConfigError: the loader has no indices.
    """

    def __init__(self, loader: Any) -> None:
        reason = reason_without_indices(loader)
        if reason:
            raise ConfigError(
                f"a hook has uses_indices = True, and the training data has no indices: {reason}. Indices are known "
                "for map-style data sets, and for a DataLoader of one"
            )
        self._loader = loader
        self._attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._source = getattr(loader, self._attribute)
        self._queue: deque[Any] = deque()
        self.current: Any = None

    def batches(self) -> Iterator[Any]:
        """``iter(loader)``, which sets :attr:`current` when the iterator :meth:`follow` returns is read."""
        workers = getattr(self._loader, "_iterator", None)
        if workers is not None:  # persistent ones, which keep the sampler that they started with
            workers._index_sampler = self
        with swapped(self._loader, **{self._attribute: self}):
            return iterate(self._loader)

    def follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of :meth:`batches`, and set :attr:`current` for each."""
        return _Followed(self, batches)

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers calls iter() twice and reads the second.
        queue = self._queue = deque()
        return _keep(iter(self._source), queue)

    def read(self) -> None:
        """A batch was read: its indices are :attr:`current`."""
        self.current = self._queue.popleft() if self._queue else None


class _Followed:
    # Not a generator, whose frame would keep the batch alive during the step.
    def __init__(self, indices: IndexStream, batches: Iterator[Any]) -> None:
        self._indices = indices
        self._batches = batches

    def __iter__(self) -> "_Followed":
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        finally:  # after an error the indices are those of the batch that could not be read
            self._indices.read()


def _keep(source: Iterator[Any], queue: deque[Any]) -> Iterator[Any]:
    for indices in source:
        queue.append(indices)
        yield indices


def reason_without_indices(loader: Any) -> str:
    """Why a loader has no indices; empty if it has."""
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"{name} is no DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__name__} is iterable"
    if has_state(loader):
        return f"{name} reads them in a way of its own"
    if not getattr(loader, "in_order", True):
        return "the loader's in_order is False"
    return ""
