"""Make a batch from samples. An error names the samples it came from."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from ...config.errors import MismatchError
from .workers import WorkerLoader, swapped

__all__ = ["BatchLoader", "batch_reader", "identity", "make_batch", "note_sample", "read_sample"]

_NOTE = "while reading "
# Errors of a whole batch list so many samples, at most.
_MAX_LISTED = 8


def make_batch(
    dataset: Any, fetch: Callable[[Any], Any] | None, collate: Callable[[Any], Any], indices: Iterable[Any]
) -> Any:
    """Read the samples of a batch and collate them.

    Args:
        dataset: map-style.
        fetch: its :func:`batch_reader`.
        collate: makes a batch from a list of samples.
        indices: of the samples.

    Raises:
        MismatchError: the samples do not make a batch, without a collate function of one's own.
        Exception: of the data set or the collate function, with a note that names the samples.
    """
    samples: Any = None
    try:
        samples = [read_sample(dataset, index) for index in indices] if fetch is None else fetch(indices)
        return collate(samples)
    except Exception as error:
        if not _has_note(error):
            names = [_sample_name(dataset, index) for index in islice(indices, _MAX_LISTED)]
            error.add_note(f"while making a batch of {', '.join(names)}{', ...' if len(names) == _MAX_LISTED else ''}")
            error.add_note('DATALOADER.COLLATE_FN names what makes batches: "pad_collate", or a function of your own')
            if samples is not None and collate is default_collate:
                clear = MismatchError(f"the samples do not make a batch: {error}")
                clear.__notes__ = error.__notes__
                raise clear from error
        raise


def batch_reader(dataset: Any) -> Callable[[Any], Any] | None:
    """The ``__getitems__`` of a data set that reads whole batches, or None. A Subset has one only if its data has."""
    owner = dataset
    while isinstance(owner, Subset) and type(owner).__getitems__ is Subset.__getitems__:
        owner = owner.dataset
    return getattr(dataset, "__getitems__", None) if hasattr(owner, "__getitems__") else None


def read_sample(dataset: Any, index: Any) -> Any:
    """Read a sample. An error gets a note that names the sample."""
    try:
        return dataset[index]
    except Exception as error:
        note_sample(error, _sample_name(dataset, index))
        raise


def note_sample(error: Exception, name: str) -> None:
    """Add a note to an error that names the sample that was read."""
    if not _has_note(error):
        error.add_note(f"{_NOTE}{name}")


def _has_note(error: Exception) -> bool:
    return any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))


def _sample_name(dataset: Any, index: Any) -> str:
    """Name a sample: its index in the data set itself, not in a ``Subset`` or ``ConcatDataset`` of it."""
    part = ""
    try:
        while isinstance(dataset, Subset | ConcatDataset):
            if isinstance(dataset, Subset):
                dataset, index = dataset.dataset, dataset.indices[index]
                continue
            number = bisect_right(dataset.cumulative_sizes, index)
            index -= dataset.cumulative_sizes[number - 1] if number else 0
            dataset, part = dataset.datasets[number], f" (set {number} of the concatenated ones)"
    except (IndexError, TypeError):
        pass  # the index itself is the error
    return f"sample {index} of {type(dataset).__name__}{part}"


def identity(batch: Any) -> Any:
    """Collate function for items that are batches already."""
    return batch


class BatchLoader(WorkerLoader):
    """A DataLoader of a map-style data set whose errors name the sample, also from workers."""

    def __iter__(self) -> Any:
        with swapped(self, dataset=_BatchReader(self.dataset, self.collate_fn), collate_fn=identity):
            return super().__iter__()


class _BatchReader(Dataset[Any]):
    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._fetch = batch_reader(dataset)
        self._collate = collate

    def __getitems__(self, indices: Iterable[Any]) -> Any:
        return make_batch(self._dataset, self._fetch, self._collate, indices)
