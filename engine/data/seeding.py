"""Seed the random numbers of each sample by its position in the stream.

Data sets draw random numbers (crops, noise, mixing in a collate function) from the global generators of python, numpy
and torch. Their state depends on what the process has read before: it differs with the number of workers and ranks, and
after a resume. Here the three generators are seeded before each sample, from the run's seed and the sample's position.
A sample then gets the same random numbers in every process.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from ...hooks.common.rng import preserve_rng
from .batch_sampler import PlacedBatch
from .generators import COLLATE, GENERATORS, SAMPLE, Generator, seed_generators, stream_key
from .reading import batch_reader, identity, make_batch, read_sample
from .workers import WorkerLoader, swapped

__all__ = ["SeededLoader", "is_deterministic", "isolated_generators"]


def isolated_generators() -> AbstractContextManager[None]:
    """Restore the global generators at the end of the block, which the model draws from too.

    In a loader's worker only the data draws from them, so nothing is restored.
    """
    return preserve_rng() if get_worker_info() is None else nullcontext()


class SeededLoader(WorkerLoader):
    """A DataLoader whose samples draw the same random numbers in any process.

    The generators are seeded before each sample, by its position in a :class:`~hookline.engine.data.PlacedBatch` (in
    other batches by its index), and before the batch is collated, by the position of its first sample. A data set with
    ``__getitems__`` is seeded once per batch, by the first position.

    Args:
        dataset: map-style.
        seed: seed of the run, the same on all ranks.
        **options: as for DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], *, seed: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._seed = seed

    def __iter__(self) -> Any:
        with swapped(self, dataset=_SeededReader(self.dataset, self.collate_fn, self._seed), collate_fn=identity):
            return super().__iter__()


class _Getter(Protocol):
    def __getitem__(self, index: int) -> Any: ...


class _SeededReader(Dataset[Any]):
    """Reads and collates whole batches of a data set, seeding as :class:`SeededLoader` says.

    Seeding all generators takes longer than reading a small sample, and most data sets draw from one or none. So only
    torch's, which takes 1 µs, and those are seeded that the data set has drawn from. A batch that draws from another
    one is read again.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int) -> None:
        self._dataset: _Getter = dataset
        self._collate = collate
        self._seed = seed
        self._read_batch = batch_reader(dataset)
        # Generators that the data set draws from, by their numbers in GENERATORS. Torch's is always seeded: a data set
        # may read torch.initial_seed(), or draw in torch.random.fork_rng(), and its state is then unchanged.
        self._drawn = [len(GENERATORS) - 1]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        batch, drawn = self._read(indices)
        while not drawn.issubset(self._drawn):
            self._drawn = sorted(drawn.union(self._drawn))
            batch, drawn = self._read(indices)
        return batch

    def _read(self, indices: Sequence[int]) -> tuple[Any, set[int]]:
        """Return a batch, and the generators it drew from. They are restored, since the model draws from them too."""
        before = [generator.get() for generator in GENERATORS]
        drawn: set[int] = set()
        try:
            batch = self._read_seeded(indices, [GENERATORS[number] for number in self._drawn])
        finally:
            for number, (generator, state) in enumerate(zip(GENERATORS, before, strict=True)):
                if not generator.unchanged(state):
                    drawn.add(number)
                    generator.set(state)
        return batch, drawn

    def _read_seeded(self, indices: Sequence[int], generators: Sequence[Generator]) -> Any:
        epoch, places = (indices.epoch, indices.places) if isinstance(indices, PlacedBatch) else (0, indices)
        dataset, key = self._dataset, stream_key(self._seed, epoch, SAMPLE)
        if self._read_batch is not None:
            seed_generators(key, places[0], generators)
            samples = make_batch(dataset, self._read_batch, identity, indices)
        else:
            samples = []
            for place, index in zip(places, indices, strict=True):
                seed_generators(key, place, generators)
                samples.append(read_sample(dataset, index))
        seed_generators(stream_key(self._seed, epoch, COLLATE), places[0], generators)
        return make_batch(dataset, lambda _: samples, self._collate, indices)


def is_deterministic(dataset: Any, collate_fn: Callable[[Any], Any] | None = None) -> bool:
    """Whether reading a data set is known to draw no random numbers, so that no seeding is needed.

    A data set declares it by ``deterministic = True``, which does not hold for subclasses that override reading. It is
    known of TensorDatasets and sequences, and of subsets and concatenations of deterministic data sets.

    Args:
        dataset: any data set.
        collate_fn: makes its batches. Other functions than torch's and the data set's own may draw.
    """
    if collate_fn not in (None, default_collate, identity, own_collate_fn(dataset)):
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
    # A subclass that overrides reading, perhaps with augmentation, must declare it itself.
    reads = min(_depth(dataset, name) for name in ("__getitem__", "__getitems__", "__iter__", "collate_fn"))
    return said <= reads and bool(getattr(dataset, "deterministic", False))


def _depth(dataset: Any, name: str) -> float:
    """Index in the MRO of the class that defines ``name``."""
    return next((depth for depth, cls in enumerate(type(dataset).__mro__) if name in vars(cls)), float("inf"))


def own_collate_fn(dataset: Any) -> Callable[[Any], Any] | None:
    """The ``collate_fn`` of a data set, or of the data set of a Subset."""
    while isinstance(dataset, Subset) and not hasattr(dataset, "collate_fn"):
        dataset = dataset.dataset
    return getattr(dataset, "collate_fn", None)
