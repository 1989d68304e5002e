"""Read all samples of a data set, to find those that fail before a run does."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from .reading import identity
from .seeding import isolated_generators

__all__ = ["check_samples"]


def check_samples(dataset: Any, num_workers: int = 0) -> Iterator[tuple[int, str]]:
    """Read every sample once, and yield index and error of each that fails. No random numbers are changed.

    Args:
        dataset: map-style; or iterable: that is read up to the first error.
        num_workers: processes that read, for a map-style data set. 0: this one.
    """
    if isinstance(dataset, IterableDataset):
        yield from _first_error(dataset)
        return
    loader = DataLoader(_Tried(dataset), batch_size=None, num_workers=num_workers, collate_fn=identity)
    for index, error in enumerate(loader):
        if error:
            yield index, error


def _first_error(dataset: IterableDataset[Any]) -> Iterator[tuple[int, str]]:
    read = 0
    with isolated_generators():
        try:
            for read, _ in enumerate(dataset, start=1):  # noqa: B007
                pass
            error = ""
        except Exception as raised:
            error = _text(raised)
    if error:
        yield read, error


class _Tried(Dataset[str]):
    """The error of reading each sample, as text; empty if there is none."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> str:
        with isolated_generators():
            try:
                self._dataset[index]
            except Exception as error:
                return _text(error)
        return ""


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
