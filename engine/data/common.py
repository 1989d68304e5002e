"""Data sets made of other data sets, with detectron2's names: its data pipelines are built from them."""

import copy
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

__all__ = ["AspectRatioGroupedDataset", "DatasetFromList", "MapDataset", "ToIterableDataset"]

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
        if isinstance(dataset, IterableDataset):
            raise TypeError("ToIterableDataset takes a map-style data set, and this one is iterable already")
        if not isinstance(sampler, Sampler):
            raise TypeError(f"ToIterableDataset takes a torch Sampler, not {sampler!r}")
        self.dataset = dataset
        self.sampler = sampler
        self.shard_sampler = shard_sampler
        self.shard_chunk_size = shard_chunk_size

    def __iter__(self) -> Iterator[Any]:
        indices: Iterable[int] = self.sampler
        worker = get_worker_info()
        if self.shard_sampler and worker is not None:
            indices = _every_nth_chunk(indices, worker.id, worker.num_workers, self.shard_chunk_size)
        for index in indices:
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


def _every_nth_chunk(indices: Iterable[int], first: int, step: int, size: int) -> Iterator[int]:
    stream = iter(indices)
    while chunks := list(islice(stream, step * size)):
        yield from chunks[first * size : (first + 1) * size]
