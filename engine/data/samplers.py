"""In which order samples are read.

What a training sampler yields is one stream of indices for all ranks together. A :class:`GlobalBatchSampler` cuts
it into batches and takes this rank's part of each, so the batches are the same on any number of ranks. Positions
are counted in samples of that stream, and any of them can be gone to at once: ``set_epoch(epoch, start)``.

The endless samplers can also share their stream out themselves, every ``world_size``-th index to a rank. That is
what they do by default, as in detectron2, when used without a :class:`GlobalBatchSampler`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from ...config import ConfigError, Registry
from .. import comm
from .batch_sampler import GlobalBatchSampler

__all__ = [
    "SAMPLER_REGISTRY",
    "EpochSampler",
    "GlobalBatchSampler",
    "InferenceSampler",
    "LengthGroupedSampler",
    "RandomSubsetTrainingSampler",
    "RepeatFactorTrainingSampler",
    "TrainingSampler",
]

SAMPLER_REGISTRY = Registry("SAMPLER", Iterable)
"""Samplers for ``DATALOADER.SAMPLER_TRAIN``: given ``size`` and ``seed`` where they name them, they yield the indices
of all ranks."""


@SAMPLER_REGISTRY.register()
class EpochSampler(Sampler[int]):
    """Every sample once an epoch, in an order that depends on the seed and the epoch's number alone.

    Args:
        size: samples in the data set.
        shuffle: False: in the order of the data set.
        seed: equal on all ranks.
    """

    def __init__(self, size: int, shuffle: bool = True, seed: int = 0) -> None:
        self.size = size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and how many of its samples (of all ranks together) the next ``iter()`` leaves out."""
        self.epoch = epoch
        self._start = start

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        return _as_ints(self._epoch()[start:])

    def _epoch(self) -> torch.Tensor:
        return _order(self.size, self.shuffle, (self.seed, self.epoch))

    def __len__(self) -> int:
        return self.size


@SAMPLER_REGISTRY.register()
class LengthGroupedSampler(EpochSampler):
    """Every sample once an epoch, samples of about one length together, so that batches need little padding.

    The shuffled epoch is cut into groups; each is sorted by length, longest first, and its batches are shuffled. The
    first batch holds the longest sample of all: what does not fit into memory shows at once. The order depends on the
    batch size too: where that is changed on a resume in the middle of an epoch, samples are seen twice or not at all.

    Args:
        dataset: its attribute ``lengths`` is used where ``lengths`` is not given.
        batch_size: samples of a global batch.
        lengths: (size,) numbers, one a sample.
        group: batches a group: more make batches more alike, and the order less random.
        seed: equal on all ranks.

    Raises:
        ConfigError: no lengths, or not one for each sample.
    """

    def __init__(
        self, dataset: Any, batch_size: int, lengths: Sequence[int] | None = None, group: int = 50, seed: int = 0
    ) -> None:
        super().__init__(len(dataset), True, seed)
        lengths = getattr(dataset, "lengths", None) if lengths is None else lengths
        if lengths is None or len(lengths) != self.size:
            found = "none" if lengths is None else f"{len(lengths)}"
            raise ConfigError(
                f"DATALOADER.SAMPLER_ARGS: LengthGroupedSampler needs {self.size} lengths, one a sample, and there are "
                f"{found}: give the data set an attribute lengths"
            )
        if group < 1 or batch_size < 1:
            raise ConfigError("DATALOADER.SAMPLER_ARGS: group and batch_size must be at least 1")
        self.lengths = torch.as_tensor(lengths)
        self.batch_size = batch_size
        self.group = group

    def _epoch(self) -> torch.Tensor:
        generator = _generator((self.seed, self.epoch))
        order = torch.randperm(self.size, generator=generator)
        batches: list[torch.Tensor] = []
        for part in order.split(self.group * self.batch_size):
            batches += part[self.lengths[part].argsort(descending=True, stable=True)].split(self.batch_size)
        # Only the epoch's last batch may be short, or the others would not start where batches are cut.
        last = [batches.pop()] if len(batches[-1]) < self.batch_size else []
        batches = [batches[index] for index in torch.randperm(len(batches), generator=generator)]
        if batches:
            longest = max(range(len(batches)), key=lambda index: int(self.lengths[batches[index][0]]))
            batches[0], batches[longest] = batches[longest], batches[0]
        return torch.cat(batches + last)


class _EndlessSampler(Sampler[int]):
    """A stream made of one pass over the data after the other; subclasses say what a pass is."""

    def __init__(self, seed: int | None, rank: int | None, world_size: int | None) -> None:
        self.seed = comm.shared_random_seed() if seed is None else seed
        self.rank = comm.get_data_rank() if rank is None else rank
        self.world_size = comm.get_data_size() if world_size is None else world_size
        self.epoch = 0
        self._start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose where the next ``iter()`` begins.

        Args:
            epoch: number of the stream: each is another one. A run that never ends its stream stays in 0.
            start: samples of the stream (of all ranks together) left out.
        """
        self.epoch = epoch
        self._start = start

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        return islice(self._stream(start), self.rank, None, self.world_size)

    def _stream(self, start: int) -> Iterator[int]:
        first, start = self._seek(start)
        for number in count(first):
            yield from _as_ints(self._pass(number)[start:])
            start = 0

    def _seek(self, start: int) -> tuple[int, int]:
        """The number of the pass that position ``start`` of the stream is in, and the place in it."""
        return divmod(start, len(self._pass(0)))

    def _pass(self, number: int) -> torch.Tensor:
        raise NotImplementedError


@SAMPLER_REGISTRY.register()
class TrainingSampler(_EndlessSampler):
    """An endless stream of shuffled passes over the data set.

    Args:
        size: samples in the data set.
        shuffle: False: every pass is in the order of the data set.
        seed: equal on all ranks; None: a random one that the ranks agree on.
        rank: this rank yields every ``world_size``-th index, beginning with the ``rank``-th. Default: this process's
            data rank.
        world_size: number of parts. Default: the number of data ranks. With 1 the whole stream is yielded.
    """

    def __init__(
        self,
        size: int,
        shuffle: bool = True,
        seed: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"an endless stream needs at least one sample, got size={size}")
        super().__init__(seed, rank, world_size)
        self.size = size
        self.shuffle = shuffle

    def _pass(self, number: int) -> torch.Tensor:
        return _order(self.size, self.shuffle, (self.seed, self.epoch, number))

    def _seek(self, start: int) -> tuple[int, int]:
        return divmod(start, self.size)


@SAMPLER_REGISTRY.register()
class RandomSubsetTrainingSampler(TrainingSampler):
    """:class:`TrainingSampler` on a random part of the data set, chosen once.

    Args:
        size: samples in the data set.
        subset_ratio: share of them that is used, in (0, 1].
        shuffle: shuffle each pass over the subset.
        seed_shuffle: seed of that shuffling; None: a random one that the ranks agree on.
        seed_subset: seed of the choice; None likewise.
        rank: as in :class:`TrainingSampler`.
        world_size: as in :class:`TrainingSampler`.
    """

    def __init__(
        self,
        size: int,
        subset_ratio: float,
        shuffle: bool = True,
        seed_shuffle: int | None = None,
        seed_subset: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not 0.0 < subset_ratio <= 1.0:
            raise ValueError(f"subset_ratio must be in (0, 1], not {subset_ratio}")
        super().__init__(int(size * subset_ratio), shuffle, seed_shuffle, rank=rank, world_size=world_size)
        seed_subset = comm.shared_random_seed() if seed_subset is None else seed_subset
        self.indices = _order(size, True, (seed_subset,))[: self.size]

    def _pass(self, number: int) -> torch.Tensor:
        return self.indices[super()._pass(number)]


@SAMPLER_REGISTRY.register()
class RepeatFactorTrainingSampler(_EndlessSampler):
    """An endless stream in which each sample appears ``factor`` times a pass on average (Gupta et al., LVIS,
    arXiv:1908.03195, section 4): a factor's fraction is rounded up or down at random, anew for each pass.

    Args:
        repeat_factors: (size,) floats >= 0, one a sample.
        shuffle: shuffle each pass.
        seed: equal on all ranks; None: a random one that the ranks agree on.
        rank: as in :class:`TrainingSampler`.
        world_size: as in :class:`TrainingSampler`.
    """

    def __init__(
        self,
        repeat_factors: torch.Tensor | Sequence[float],
        *,
        shuffle: bool = True,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(seed, rank, world_size)
        self.shuffle = shuffle
        factors = torch.as_tensor(repeat_factors, dtype=torch.float64)
        if not factors.sum() > 0:
            raise ValueError("repeat_factors must contain positive numbers: the stream would be empty")
        self._whole = factors.floor().long()
        self._fraction = factors - self._whole

    @staticmethod
    def repeat_factors_from_category_frequency(
        category_ids: Iterable[Iterable[int]], repeat_thresh: float, sqrt: bool = True
    ) -> torch.Tensor:
        """Factors that show rare categories more often.

        A category in a share ``f`` of the samples gets ``max(1, sqrt(repeat_thresh / f))``, and a sample the
        largest factor of its categories.

        Args:
            category_ids: for each sample, the categories in it.
            repeat_thresh: categories in fewer samples than this share are repeated.
            sqrt: False: ``repeat_thresh / f`` without the root.

        Returns:
            (size,) factors >= 1.
        """
        samples = [set(ids) for ids in category_ids]
        frequency = Counter(category for ids in samples for category in ids)
        factor = {
            category: max(1.0, (repeat_thresh * len(samples) / number) ** (0.5 if sqrt else 1.0))
            for category, number in frequency.items()
        }
        return torch.tensor([max((factor[category] for category in ids), default=1.0) for ids in samples])

    def _pass(self, number: int) -> torch.Tensor:
        generator = _generator((self.seed, self.epoch, number))
        draws = torch.rand(len(self._fraction), generator=generator, dtype=torch.float64)
        times = self._whole + (draws < self._fraction)
        indices = torch.repeat_interleave(times)
        return indices[torch.randperm(len(indices), generator=generator)] if self.shuffle else indices

    def _seek(self, start: int) -> tuple[int, int]:
        number = 0
        while start >= (length := len(self._pass(number))):  # passes differ in length
            start -= length
            number += 1
        return number, start


class InferenceSampler(Sampler[int]):
    """This rank's share of a data set, in order: every sample on exactly one rank, without padding.

    Args:
        size: samples in the data set. The shares are contiguous and differ by one sample at most.
    """

    def __init__(self, size: int) -> None:
        rank, world_size = comm.get_data_rank(), comm.get_data_size()
        share, rest = divmod(size, world_size)
        begin = rank * share + min(rank, rest)
        self._indices = range(begin, begin + share + (rank < rest))

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def _order(size: int, shuffle: bool, seeds: tuple[int, ...]) -> torch.Tensor:
    return torch.randperm(size, generator=_generator(seeds)) if shuffle else torch.arange(size)


def _generator(seeds: tuple[int, ...]) -> torch.Generator:
    """A generator whose stream is a function of all the numbers together (not of their sum)."""
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> 1))


def _as_ints(indices: torch.Tensor) -> Iterator[int]:
    for part in indices.split(65536):  # python ints of a whole large data set would take gigabytes
        yield from part.tolist()
