"""Random numbers of a sample as a function of where it stands, whoever reads it and when.

What a data set draws (random crops, noise, mixing in a collate function) comes from the global generators of python,
numpy and torch, of whichever process reads. Their state there depends on what that process has read before, so it
differs with the number of workers and ranks, and after a resume. Here the three are seeded before each sample from the
run's seed and the sample's place in the stream; its draws are then the same bits wherever and whenever it is read.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from ...hooks.common.rng import preserve_rng
from .batch_sampler import PlacedBatch
from .workers import WorkerLoader, swapped

__all__ = ["SeededLoader", "is_deterministic", "isolated_generators", "seed_generators", "stream_key"]

_MASK = 2**64 - 1
# What is drawn at one place, apart from the sample itself, has a stream of its own.
SAMPLE, COLLATE, TRANSFORM = 0, 1, 2


def stream_key(*numbers: int) -> int:
    """One 64-bit number out of several, such as the run's seed, the epoch and what is drawn for."""
    key = 0
    for number in numbers:
        key = _mix(key ^ _mix(number & _MASK))
    return key


def seed_generators(key: int, place: int) -> None:
    """Seed python's, numpy's and torch's global CPU generators for one place of a stream.

    Takes some 7 µs. Generators of GPUs are left alone: samples are made on the CPU, and ``torch.manual_seed`` would
    cost many times as much for them.

    Args:
        key: the stream's, see :func:`stream_key`.
        place: of a sample in it.
    """
    seed = _mix(key + place)
    random.seed(seed)
    np.random.seed(seed >> 32)
    torch.default_generator.manual_seed(seed >> 1)


def _mix(x: int) -> int:
    """One step of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def isolated_generators() -> AbstractContextManager[None]:
    """Restore the global generators at the end of the block, which the model draws from too.

    In a loader's worker only the data draws from them, so nothing is restored.
    """
    return preserve_rng() if get_worker_info() is None else nullcontext()


class SeededLoader(WorkerLoader):
    """A DataLoader whose samples draw the same random numbers in any process.

    Before a sample is read the generators are seeded by its place, which its batch brings along
    (:class:`~hookline.engine.data.PlacedBatch`; of other batches the index is the place), and once more before the
    batch is collated, by the place of the batch's first sample. A data set with ``__getitems__`` reads a batch at once:
    it is seeded once, by the first place too. ``loader.dataset`` and ``loader.collate_fn`` are those that were given.

    Args:
        dataset: map-style.
        seed: the run's, the same on all ranks.
        **options: as for DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], *, seed: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._seed = seed

    def __iter__(self) -> Any:
        with swapped(self, dataset=_SeededReader(self.dataset, self.collate_fn, self._seed), collate_fn=as_it_is):
            return super().__iter__()


def as_it_is(batch: Any) -> Any:
    """The collate function of batches that are made already."""
    return batch


class _Getter(Protocol):
    def __getitem__(self, index: int) -> Any: ...


class _SeededReader(Dataset[Any]):
    """Reads and collates whole batches of a data set, seeding as :class:`SeededLoader` says."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int) -> None:
        self._dataset: _Getter = dataset
        self._collate = collate
        self._seed = seed
        self._read_batch = getattr(dataset, "__getitems__", None) if _reads_batches(dataset) else None

    def __getitems__(self, indices: Sequence[int]) -> Any:
        epoch, places = (indices.epoch, indices.places) if isinstance(indices, PlacedBatch) else (0, indices)
        dataset, key = self._dataset, stream_key(self._seed, epoch, SAMPLE)
        with isolated_generators():
            if self._read_batch is not None:
                seed_generators(key, places[0])
                samples = self._read_batch(indices)
            else:
                samples = []
                for place, index in zip(places, indices, strict=True):
                    seed_generators(key, place)
                    samples.append(dataset[index])
            seed_generators(stream_key(self._seed, epoch, COLLATE), places[0])
            return self._collate(samples)


def _reads_batches(dataset: Any) -> bool:
    """Whether the data set itself reads batches. A Subset always offers to, even of one that does not."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def is_deterministic(dataset: Any, collate_fn: Callable[[Any], Any] | None = None) -> bool:
    """Whether it is known that reading a data set draws no random numbers, so that nothing need be seeded.

    A data set says so by ``deterministic = True``, which holds for its class and for subclasses that read in no other
    way. Known without saying are tensors and sequences, and subsets and concatenations of what is known.

    Args:
        dataset: any.
        collate_fn: makes its batches; of one that is not the data set's own or torch's nothing is known.
    """
    if collate_fn is not None and collate_fn not in (default_collate, as_it_is) and not _is_own(collate_fn, dataset):
        return False
    if isinstance(dataset, Subset):
        return is_deterministic(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(is_deterministic, dataset.datasets))
    if type(dataset) in (TensorDataset, list, tuple, range):
        return True
    if "deterministic" in getattr(dataset, "__dict__", {}):
        return bool(dataset.deterministic)
    said = _depth(dataset, "deterministic")
    # A subclass that reads otherwise, with augmentation perhaps, has to say it for itself.
    reads = min(_depth(dataset, name) for name in ("__getitem__", "__getitems__", "__iter__", "collate_fn"))
    return said <= reads and bool(getattr(dataset, "deterministic", False))


def _depth(dataset: Any, name: str) -> float:
    """How many classes up the one is that defines ``name``."""
    return next((depth for depth, cls in enumerate(type(dataset).__mro__) if name in vars(cls)), float("inf"))


def _is_own(collate_fn: Callable[[Any], Any], dataset: Any) -> bool:
    while isinstance(dataset, Subset) and not hasattr(dataset, "collate_fn"):
        dataset = dataset.dataset
    return collate_fn == getattr(dataset, "collate_fn", None)
