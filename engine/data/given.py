"""Loaders in the place of data sets."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn

from torch.utils.data import DataLoader, Dataset

from ...config import ConfigError
from .. import comm

__all__ = ["NoTrainData", "is_loader", "use_loader"]


class NoTrainData:
    """The training data of a trainer that only evaluates and predicts."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[NoReturn]:
        raise ConfigError("train_data: this trainer has none, so it can only evaluate and predict")


def is_loader(data: Any) -> bool:
    """Return whether an object is a loader of batches: a ``DataLoader``, or an iterable without indices that is no
    data set."""
    if isinstance(data, DataLoader | NoTrainData):
        return True
    return isinstance(data, Iterable) and not isinstance(data, Dataset) and not hasattr(data, "__getitem__")


def use_loader(loader: Any, key: str, limit: int = 0) -> Any:
    """Return a loader that is used in the place of a data set.

    Args:
        loader: see :func:`is_loader`.
        key: the key that names or holds the loader.
        limit: only its first so many batches are read; 0: all.

    Raises:
        ConfigError: there are several ranks, and the loader gives all of them the same batches.
    """
    samplers = [type(getattr(loader, name, None)) for name in ("sampler", "batch_sampler")]
    shared = all(sampler.__module__ == "torch.utils.data.sampler" for sampler in samplers)
    if comm.get_data_size() > 1 and type(loader) is DataLoader and shared:
        raise ConfigError(
            f"{key}: a DataLoader gives each of {comm.get_data_size()} ranks all samples; pass the data set, which is "
            "split between the ranks, or give the loader a DistributedSampler"
        )
    return _FirstBatches(loader, limit) if limit else loader


class _FirstBatches:
    """The first batches of a loader, in each pass."""

    def __init__(self, loader: Any, number: int) -> None:
        self._loader = loader
        self._number = number
        for name in ("sampler", "batch_sampler"):  # their set_epoch() is called
            if hasattr(loader, name):
                setattr(self, name, getattr(loader, name))

    def __len__(self) -> int:
        return min(self._number, len(self._loader))

    def __iter__(self) -> Iterator[Any]:
        return islice(self._loader, self._number)
