"""Data sets: the registry, tensors in memory, small sets of real data, and detectron2's sets made of other sets."""

import copy
import functools
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from ...config import ConfigError, Registry, component
from ...config.components import ComponentKey, errors_at


@runtime_checkable
class _Samples(Protocol):
    """Has samples by index: a data set or a list."""

    def __getitem__(self, index: int) -> Any: ...


DATASET_REGISTRY = Registry("DATASET", (Dataset, Iterable, _Samples))
"""Data sets for ``DATASETS.TRAIN`` and ``DATASETS.TEST``: classes, or functions that return one."""

TRAIN_KEY = ComponentKey(DATASET_REGISTRY, "DATASETS.TRAIN", offers=())
TEST_KEY = ComponentKey(DATASET_REGISTRY, "DATASETS.TEST", offers=())


class ArrayDataset(Dataset[tuple[torch.Tensor, ...]]):
    """Tensors in memory: sample ``i`` is row ``i`` of each.

    Loaders read a whole batch by one indexing per tensor, without collating samples. Your own ``DataLoader`` needs
    ``collate_fn=dataset.collate_fn``.

    Args:
        tensors: one or more (N, ...), with the same N. Sample ``i`` is a tuple of tensors (...).

    Attributes:
        deterministic: reading draws no random numbers, so loaders need not seed it. A subclass that overrides reading
            must declare it again.
    """

    deterministic = True

    def __init__(self, *tensors: torch.Tensor) -> None:
        if len(set(map(len, tensors))) != 1:
            raise ValueError(f"expected tensors of the same length, got {[tuple(t.shape) for t in tensors]}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return a batch: the rows of each tensor, (len(indices), ...)."""
        rows = torch.from_numpy(np.array(indices, dtype=np.int64))  # five times as fast as torch.tensor()
        return tuple(map(methodcaller("index_select", 0, rows), self.tensors))

    @staticmethod
    def collate_fn(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the batch, tensors (N, ...), unchanged: ``__getitems__`` returns batches."""
        return batch


def get_dataset(entry: str | dict[str, Any], key: str) -> Dataset[Any]:
    """Build a data set.

    Args:
        entry: a name of :data:`DATASET_REGISTRY`, or ``{"NAME": ..., "ARGS": {...}}``.
        key: its config key, for error messages.
    """
    name, args = component(entry)
    with errors_at(f"{key} ({name})"):
        dataset = DATASET_REGISTRY.build(name, args, key=f"{key}.NAME")
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
    """The other 355 digits, images (1, 8, 8) and labels; normalised with the training set's mean and deviation."""
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


# ---------------------------------------------------------------------------- with detectron2's names

_ATTEMPTS = 1000


class DatasetFromList(Dataset[Any]):
    """A data set with the elements of a list.

    Args:
        lst: the elements.
        copy: return a copy of an element, so that changes of it do not reach the list.
        serialize: keep all elements pickled in one array, which loader workers share instead of copying it. Every
            element that is read is then a copy.
    """

    deterministic = True

    def __init__(self, lst: list[Any], copy: bool = True, serialize: bool = True) -> None:
        self._copy = copy
        self._serialize = serialize
        self._lst: Any = lst
        if serialize:
            pickled = [pickle.dumps(element, protocol=pickle.HIGHEST_PROTOCOL) for element in lst]
            self._ends = np.cumsum([len(one) for one in pickled], dtype=np.int64)
            self._lst = np.frombuffer(b"".join(pickled), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ends) if self._serialize else len(self._lst)

    def __getitem__(self, index: int) -> Any:
        if not self._serialize:
            return copy.deepcopy(self._lst[index]) if self._copy else self._lst[index]
        index = range(len(self))[index]  # negative indices, and IndexError
        start = self._ends[index - 1] if index else 0
        return pickle.loads(memoryview(self._lst[start : self._ends[index]]))


class MapDataset(Dataset[Any]):
    """A data set whose samples are ``map_func(sample)`` of another.

    If ``map_func`` returns None, another sample is drawn at random; an iterable data set continues with its next one.

    Args:
        dataset: map-style, or iterable: then this is an iterable data set too.
        map_func: makes a sample from a sample. Workers that are not forked pickle it, so it is no lambda there.
    """

    def __new__(cls, dataset: Any, map_func: Callable[[Any], Any]) -> Any:
        if isinstance(dataset, IterableDataset):
            return _MapIterableDataset(dataset, map_func)
        return super().__new__(cls)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self._dataset, self._map_func

    def __init__(self, dataset: Any, map_func: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._map_func = map_func

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        first = index = int(index)
        for _ in range(_ATTEMPTS):
            sample = self._map_func(self._dataset[index])
            if sample is not None:
                return sample
            index = random.randrange(len(self))
        raise RuntimeError(
            f"the map function returned None for sample {first} and for {_ATTEMPTS - 1} others drawn at random"
        )


class _MapIterableDataset(IterableDataset[Any]):
    """:class:`MapDataset` of an iterable data set."""

    def __init__(self, dataset: Any, map_func: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._map_func = map_func
        self.shares_itself_out = getattr(dataset, "shares_itself_out", False)

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        for element in self._dataset:
            sample = self._map_func(element)
            if sample is not None:
                yield sample


class ToIterableDataset(IterableDataset[Any]):
    """A map-style data set as an iterable one, in the order of a sampler.

    Each loader worker runs the sampler and reads its own part of the indices.

    Args:
        dataset: map-style.
        sampler: yields the indices of this rank.
        shard_sampler: False if the sampler itself yields other indices in each worker.
        shard_chunk_size: a worker takes this many indices in a row.
    """

    shares_itself_out = True  # between ranks by the sampler, between workers here

    def __init__(
        self, dataset: Dataset[Any], sampler: Sampler[int], shard_sampler: bool = True, shard_chunk_size: int = 1
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.shard_sampler = shard_sampler
        self.shard_chunk_size = shard_chunk_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info() if self.shard_sampler else None
        for number, index in enumerate(self.sampler):
            if worker is None or number // self.shard_chunk_size % worker.num_workers == worker.id:
                yield self.dataset[index]


class AspectRatioGroupedDataset(IterableDataset[list[Any]]):
    """Batches of dicts that are all wider than high, or all not, which need less padding.

    A batch is yielded as soon as it is full. Batches that are not full at the end are dropped.

    Args:
        dataset: yields dicts with the entries ``width`` and ``height``.
        batch_size: dicts per batch.
    """

    def __init__(self, dataset: Iterable[Any], batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._buckets: tuple[list[Any], list[Any]] = ([], [])

    def __iter__(self) -> Iterator[list[Any]]:
        for sample in self.dataset:
            bucket = self._buckets[sample["width"] <= sample["height"]]
            bucket.append(sample)
            if len(bucket) == self.batch_size:
                batch = bucket[:]
                bucket.clear()  # before the yield: a reader may stop here
                yield batch
