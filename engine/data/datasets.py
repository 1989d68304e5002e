"""Data sets: the registry, tensors in memory, and a few small sets of real data."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Dataset

from ...config import ConfigError, Registry, component
from ...config.slots import Slot, errors_at

__all__ = ["DATASET_REGISTRY", "ArrayDataset", "get_dataset"]


@runtime_checkable
class _Samples(Protocol):
    """Has samples by index: a data set or a list."""

    def __getitem__(self, index: int) -> Any: ...


DATASET_REGISTRY = Registry("DATASET", (Dataset, Iterable, _Samples))
"""Data sets for ``DATASETS.TRAIN`` and ``DATASETS.TEST``: classes, or functions that return one."""

TRAIN_SLOT = Slot(DATASET_REGISTRY, "DATASETS.TRAIN", offers=())
TEST_SLOT = Slot(DATASET_REGISTRY, "DATASETS.TEST", offers=())


class ArrayDataset(Dataset[tuple[torch.Tensor, ...]]):
    """Tensors in memory: sample ``i`` is row ``i`` of each.

    Loaders read a whole batch by one indexing per tensor, without collating samples. Your own ``DataLoader`` needs
    ``collate_fn=dataset.collate_fn``.

    Args:
        tensors: one or more, of the same length N.

    Attributes:
        deterministic: reading draws no random numbers, so loaders need not seed it. A subclass that overrides reading
            must declare it again.
    """

    deterministic = True

    def __init__(self, *tensors: torch.Tensor) -> None:
        if not tensors or any(len(tensor) != len(tensors[0]) for tensor in tensors):
            raise ValueError(f"expected tensors of the same length, got {[tuple(t.shape) for t in tensors]}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return a batch: the rows of each tensor, (len(indices), ...)."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return tuple([tensor.index_select(0, rows) for tensor in self.tensors])

    @staticmethod
    def collate_fn(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the batch unchanged: ``__getitems__`` returns batches."""
        return batch


def get_dataset(entry: str | dict[str, Any], key: str) -> Dataset[Any]:
    """Build a data set.

    Args:
        entry: a name of :data:`DATASET_REGISTRY`, or ``{"NAME": ..., "ARGS": {...}}``.
        key: its config key, for error messages.
    """
    name, args = component(entry)
    with errors_at(f"{key.removesuffix('.ARGS')} ({name})"):
        dataset = DATASET_REGISTRY.build(name, args, key=key)
        if hasattr(dataset, "__getitem__") and not (hasattr(dataset, "__len__") or isinstance(dataset, Iterable)):
            raise ConfigError(f"{type(dataset).__name__} has __getitem__() but no __len__(); it needs both")
    return dataset


@DATASET_REGISTRY.register()
def digits_train() -> ArrayDataset:
    """1,442 handwritten digits: images (1, 8, 8) float32, normalised, and labels 0 to 9, int64.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI (1998), as in scikit-learn.
    """
    return _digits()[0]


@DATASET_REGISTRY.register()
def digits_test() -> ArrayDataset:
    """The other 355 digits; normalised with the training set's mean and deviation."""
    return _digits()[1]


@DATASET_REGISTRY.register()
def synthetic(size: int = 1024, shape: Sequence[int] = (8,), num_classes: int = 4, seed: int = 0) -> ArrayDataset:
    """Noisy points around one centre per class. A linear model separates most of them.

    Args:
        size: number of samples.
        shape: shape of a sample.
        num_classes: number of classes, equally likely.
        seed: seed of the samples. The centres depend only on ``shape`` and ``num_classes``, so two seeds give a
            training and a test set of the same task.

    Returns:
        Inputs (size, *shape) float32 and labels (size,) int64.
    """
    centres = torch.randn(num_classes, *shape, generator=torch.Generator().manual_seed(num_classes))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (size,), generator=generator)
    noise = torch.randn(size, *shape, generator=generator)
    return ArrayDataset(centres[labels] + 0.5 * noise, labels)


@functools.cache
def _digits() -> tuple[ArrayDataset, ArrayDataset]:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ConfigError("DATASETS: the digits_* sets need scikit-learn: pip install 'hookline[digits]'") from error
    x, y = datasets.load_digits(return_X_y=True)
    in_test = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):  # every fifth sample of each class
        in_test[np.flatnonzero(y == label)[4::5]] = True
    x = (x / 16.0).reshape(-1, 1, 8, 8)  # 17 grey levels
    x = (x - x[~in_test].mean()) / x[~in_test].std()
    train, test = (
        ArrayDataset(torch.from_numpy(x[part].astype(np.float32)), torch.from_numpy(y[part].astype(np.int64)))
        for part in (~in_test, in_test)
    )
    return train, test
