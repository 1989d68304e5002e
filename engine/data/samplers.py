"""Samplers: the order in which samples are read.

A training sampler yields one stream of indices for all ranks. A :class:`GlobalBatchSampler` splits it into batches and
takes this rank's part of each, so the batches are the same on any number of ranks. Positions are counted in samples of
that stream; ``set_epoch(epoch, start)`` starts at any position directly.

Without a :class:`GlobalBatchSampler`, the endless samplers yield every ``world_size``-th index of the stream, as in
detectron2.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from operator import index
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

from ...config import ConfigError, Registry
from .. import comm
from .seeding import seeded_generator

SAMPLER_REGISTRY = Registry("SAMPLER", Iterable)
"""Samplers for ``DATALOADER.SAMPLER_TRAIN``. They receive ``size`` and ``seed`` if they name them, and yield the
indices of all ranks."""


@SAMPLER_REGISTRY.register()
class EpochSampler(Sampler[int]):
    """Every sample once per epoch, in an order that depends only on the seed and the epoch.

    Args:
        size: samples in the data set.
        shuffle: False keeps the order of the data set.
        seed: the same on all ranks.
    """

    def __init__(self, size: int, shuffle: bool = True, seed: int = 0) -> None:
        self.size = size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch, and the number of its samples (over all ranks) that the next ``iter()`` skips."""
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
    """Every sample once per epoch, in batches of samples of similar length, which need little padding.

    The shuffled epoch is split into groups. Each group is sorted by length, longest first, and all batches are
    shuffled. The first batch has the longest sample, so that running out of memory shows at once. The order depends on
    the batch size: if it changes on a resume in the middle of an epoch, samples are repeated or missed.

    Args:
        dataset: has the attribute ``lengths`` if the argument is not given.
        batch_size: samples per global batch.
        lengths: (size,) numbers, one per sample.
        group: batches per group. Larger groups need less padding and are less random.
        seed: the same on all ranks.

    Raises:
        ConfigError: there are no lengths, or not one per sample.
    """

    def __init__(
        self, dataset: Any, batch_size: int, lengths: Sequence[int] | None = None, group: int = 50, seed: int = 0
    ) -> None:
        super().__init__(len(dataset), True, seed)
        lengths = getattr(dataset, "lengths", None) if lengths is None else lengths
        if lengths is None or len(lengths) != self.size:
            found = "none" if lengths is None else f"{len(lengths)}"
            raise ConfigError(
                f"DATALOADER.SAMPLER_ARGS: LengthGroupedSampler needs {self.size} lengths, one per sample, not "
                f"{found}: give the data set an attribute lengths"
            )
        self.lengths = torch.as_tensor(lengths)
        self.batch_size = batch_size
        self.group = group

    def _epoch(self) -> torch.Tensor:
        generator = seeded_generator(self.seed, self.epoch)
        order = torch.randperm(self.size, generator=generator)
        batches: list[torch.Tensor] = []
        for part in order.split(self.group * self.batch_size):
            batches += part[self.lengths[part].argsort(descending=True, stable=True)].split(self.batch_size)
        # Only the last batch of the epoch may be short.
        last = [batches.pop()] if len(batches[-1]) < self.batch_size else []
        batches = [batches[index] for index in torch.randperm(len(batches), generator=generator)]
        if batches:
            longest = max(range(len(batches)), key=lambda index: int(self.lengths[batches[index][0]]))
            batches[0], batches[longest] = batches[longest], batches[0]
        return torch.cat(batches + last)


@SAMPLER_REGISTRY.register()
class TrainingSampler(Sampler[int]):
    """An endless stream of shuffled passes over the data set.

    The attributes and methods have detectron2's names, which subclasses of its samplers read and override.

    Args:
        size: samples in the data set.
        shuffle: False keeps the order of the data set.
        seed: the same on all ranks; None: a random seed shared by the ranks.
    """

    epoch = 0
    _start = 0

    def __init__(self, size: int, shuffle: bool = True, seed: int | None = None) -> None:
        if size < 1:
            raise ValueError(f"an endless stream needs at least one sample, not size={size}")
        self._size = index(size)  # a TypeError for a float
        self._shuffle = shuffle
        self._seed = comm.shared_random_seed() if seed is None else int(seed)
        self._rank, self._world_size = comm.get_data_rank(), comm.get_data_size()

    def yield_for_all_ranks(self) -> None:
        """Yield the whole stream, for a :class:`GlobalBatchSampler`, not this rank's part of it."""
        self._rank, self._world_size = 0, 1

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the position of the next ``iter()``.

        Args:
            epoch: number of the stream. Each number gives another stream; a run normally stays in stream 0.
            start: samples of the stream (over all ranks) to skip.
        """
        self.epoch = epoch
        self._start = start

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        if type(self)._infinite_indices is TrainingSampler._infinite_indices:
            stream = self._stream(start)
        else:
            stream = islice(self._infinite_indices(), start, None)
        return islice(stream, self._rank, None, self._world_size)

    def _infinite_indices(self) -> Iterator[int]:
        """The stream for all ranks. A subclass may override this method, and then yields the whole stream in it."""
        return self._stream(0)

    def _stream(self, start: int) -> Iterator[int]:
        first, start = self._seek(start)
        for number in count(first):
            yield from _as_ints(self._pass(number)[start:])
            start = 0

    def _seek(self, start: int) -> tuple[int, int]:
        """The pass that contains position ``start`` of the stream, and the position in it."""
        return divmod(start, self._size)

    def _pass(self, number: int) -> torch.Tensor:
        return _order(self._size, self._shuffle, (self._seed, self.epoch, number))


@SAMPLER_REGISTRY.register()
class RandomSubsetTrainingSampler(TrainingSampler):
    """:class:`TrainingSampler` on a random part of the data set, chosen once.

    Args:
        size: samples in the data set.
        subset_ratio: fraction of the samples to use, in (0, 1].
        shuffle: shuffle each pass over the subset.
        seed_shuffle: seed of the shuffling; None: a random seed shared by the ranks.
        seed_subset: seed of the choice; None: likewise.
    """

    def __init__(
        self,
        size: int,
        subset_ratio: float,
        shuffle: bool = True,
        seed_shuffle: int | None = None,
        seed_subset: int | None = None,
    ) -> None:
        if not 0.0 < subset_ratio <= 1.0:
            raise ValueError(f"subset_ratio must be in (0, 1], not {subset_ratio}")
        super().__init__(int(size * subset_ratio), shuffle, seed_shuffle)
        seed_subset = comm.shared_random_seed() if seed_subset is None else seed_subset
        self.indices = _order(size, True, (seed_subset,))[: self._size]

    def _pass(self, number: int) -> torch.Tensor:
        return self.indices[super()._pass(number)]


@SAMPLER_REGISTRY.register()
class RepeatFactorTrainingSampler(TrainingSampler):
    """An endless stream in which each sample appears ``factor`` times per pass on average.

    Each pass rounds the factors up or down at random (Gupta et al., LVIS, arXiv:1908.03195, section 4).

    Args:
        repeat_factors: (size,) floats >= 0, one per sample.
        shuffle: shuffle each pass.
        seed: the same on all ranks; None: a random seed shared by the ranks.
    """

    def __init__(
        self,
        repeat_factors: torch.Tensor | Sequence[float],
        *,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(max(1, len(repeat_factors)), shuffle, seed)
        factors = torch.as_tensor(repeat_factors, dtype=torch.float64)
        if not factors.sum() > 0:
            raise ValueError("repeat_factors must contain positive numbers: the stream would be empty")
        self._int_part = factors.floor().long()
        self._frac_part = factors - self._int_part

    @staticmethod
    def repeat_factors_from_category_frequency(
        dataset_dicts: Iterable[Any], repeat_thresh: float, sqrt: bool = True
    ) -> torch.Tensor:
        """Compute factors that repeat rare categories.

        A category in a fraction ``f`` of the samples gets ``max(1, sqrt(repeat_thresh / f))``. A sample gets the
        largest factor of its categories.

        Args:
            dataset_dicts: for each sample its categories, or its dict in detectron2's format:
                ``{"annotations": [{"category_id": 3}, ...]}``.
            repeat_thresh: categories in less than this fraction of the samples are repeated.
            sqrt: False: ``repeat_thresh / f`` without the root.

        Returns:
            (size,) factors >= 1.
        """
        samples = [_categories(sample) for sample in dataset_dicts]
        frequency = Counter(category for ids in samples for category in ids)
        factor = {
            category: max(1.0, (repeat_thresh * len(samples) / number) ** (0.5 if sqrt else 1.0))
            for category, number in frequency.items()
        }
        factors = [max((factor[category] for category in ids), default=1.0) for ids in samples]
        return torch.tensor(factors, dtype=torch.float32)

    def _get_epoch_indices(self, generator: torch.Generator) -> torch.Tensor:
        """The indices of one pass, before they are shuffled. A subclass may override this method."""
        draws = torch.rand(len(self._frac_part), generator=generator, dtype=torch.float64)
        return torch.repeat_interleave(self._int_part + (draws < self._frac_part))

    def _pass(self, number: int) -> torch.Tensor:
        generator = seeded_generator(self._seed, self.epoch, number)
        indices = torch.as_tensor(self._get_epoch_indices(generator))
        return indices[torch.randperm(len(indices), generator=generator)] if self._shuffle else indices

    def _seek(self, start: int) -> tuple[int, int]:
        number = 0
        while start >= (length := len(self._pass(number))):  # passes differ in length
            start -= length
            number += 1
        return number, start


class InferenceSampler(Sampler[int]):
    """This rank's part of a data set, in order: every sample on exactly one rank, without padding.

    Args:
        size: samples in the data set. The parts are contiguous and differ by at most one sample.
    """

    def __init__(self, size: int) -> None:
        self._local_indices = self._get_local_indices(size, comm.get_data_size(), comm.get_data_rank())

    @staticmethod
    def _get_local_indices(total_size: int, world_size: int, rank: int) -> range:
        share, rest = divmod(total_size, world_size)
        begin = rank * share + min(rank, rest)
        return range(begin, begin + share + (rank < rest))

    def __iter__(self) -> Iterator[int]:
        return iter(self._local_indices)

    def __len__(self) -> int:
        return len(self._local_indices)


class GroupedBatchSampler(BatchSampler):
    """Batches of indices of one group, as close as possible to the order of a sampler.

    A batch is yielded as soon as it is full. Indices of batches that are not full at the end begin the batches of
    the next pass, so a pass has no fixed length.

    Args:
        sampler: yields indices.
        group_ids: (size,) ints, the group of each sample.
        batch_size: indices per batch.
    """

    def __init__(self, sampler: Sampler[int], group_ids: Sequence[int], batch_size: int) -> None:
        self.sampler = sampler
        self.group_ids = np.asarray(group_ids)
        self.batch_size = batch_size
        self.buffer_per_group: dict[int, list[int]] = {group: [] for group in np.unique(self.group_ids).tolist()}

    def __iter__(self) -> Iterator[list[int]]:
        for sample in self.sampler:
            batch = self.buffer_per_group[int(self.group_ids[sample])]
            batch.append(sample)
            if len(batch) == self.batch_size:
                full = batch[:]
                batch.clear()  # before the yield: a reader may stop here
                yield full

    def __len__(self) -> int:
        raise TypeError("the number of batches of a GroupedBatchSampler is not known")


def _categories(sample: Any) -> set[int]:
    """The categories of a sample: ids, or a dict with detectron2's annotations."""
    if isinstance(sample, Mapping):
        return {annotation["category_id"] for annotation in sample["annotations"]}
    return set(sample)


def _order(size: int, shuffle: bool, seeds: tuple[int, ...]) -> torch.Tensor:
    return torch.randperm(size, generator=seeded_generator(*seeds)) if shuffle else torch.arange(size)


def _as_ints(indices: torch.Tensor) -> Iterator[int]:
    # A list of all indices of a large data set would take gigabytes.
    return chain.from_iterable(part.tolist() for part in indices.split(65536))
