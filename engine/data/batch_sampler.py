"""Cutting a stream of indices into the batches of each rank."""

import inspect
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from torch.utils.data import Sampler

from ...config import ConfigError
from .. import comm

__all__ = ["GlobalBatchSampler", "PlacedBatch", "RankBatchSampler"]


class PlacedBatch(list[int]):
    """The indices of a batch, with the place in the stream that each sample has.

    Attributes:
        epoch: the stream's number.
        places: of each sample, counted over all ranks.
    """

    __slots__ = ("epoch", "places")

    def __init__(self, indices: list[int], epoch: int, places: range) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.places = places

    def __reduce__(self) -> Any:  # workers are sent one with every batch: not by slots, which takes longer
        return type(self), (list(self), self.epoch, self.places)


class GlobalBatchSampler(Sampler[list[int]]):
    """Cuts a stream of indices into global batches and yields this rank's contiguous part of each.

    Args:
        sampler: yields the indices of all ranks, the same ones on every rank. If it has ``set_epoch(epoch, start)``
            it can begin anywhere at once; of others the part to be left out is read and thrown away, and their order
            must depend on nothing but the epoch, or a position means nothing.
        batch_size: samples of a global batch; it need not be a multiple of the number of ranks.
        drop_last: leave out what is left of a finite stream when no full batch can be made of it.
        rank: whose part. Default: this process's data rank.
        world_size: number of parts. Default: the number of data ranks.
        max_batches: end each epoch after so many batches. None: when the sampler does.
        placed: yield :class:`PlacedBatch`, for loaders that need the places.

    Raises:
        ConfigError: a batch would have no sample for some rank.
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        max_batches: int | None = None,
        placed: bool = False,
    ) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank = comm.get_data_rank() if rank is None else rank
        self.world_size = comm.get_data_size() if world_size is None else world_size
        self.max_batches = max_batches
        self.placed = placed
        self._epoch = 0
        self._place: tuple[int, int] | None = None  # epoch and start of the next pass, until it is read from
        if batch_size < self.world_size:
            raise ConfigError(
                f"DATALOADER.BATCH_SIZE is {batch_size}, fewer than one sample for each of {self.world_size} rank(s)"
            )
        samples = self._samples()
        last = 0 if samples is None or drop_last else samples % batch_size
        if 0 < last < self.world_size:
            raise ConfigError(
                f"the last batch of an epoch would be {last} sample(s) for {self.world_size} ranks: "
                "set DATALOADER.DROP_LAST to True, or change DATALOADER.BATCH_SIZE"
            )

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Say what the next ``iter()`` yields.

        Args:
            epoch: passed on to the sampler.
            start: samples of that epoch, of all ranks together, that have been consumed.
        """
        self._epoch = epoch
        self._place = (epoch, start)
        self._tell_sampler(epoch, start)

    def _tell_sampler(self, epoch: int, start: int) -> int:
        """Have the sampler go there; returns how many of its indices are still to be left out."""
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if set_epoch is None:
            return start
        if "start" in inspect.signature(set_epoch).parameters:
            set_epoch(epoch, start)
            return 0
        set_epoch(epoch)
        return start

    def batches_after(self, start: int) -> int | None:
        """How many batches of an epoch are left when ``start`` samples of it have been consumed; None: no end."""
        samples = self._samples()
        if samples is None:
            return None
        full, rest = divmod(max(0, samples - start), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def share(self, start: int) -> float:
        """This rank's samples of the batch that begins at ``start`` in an epoch, over the mean of all ranks' numbers.

        Times it, the ranks' means over their samples have the mean over the batch for their mean.
        """
        samples = self._samples()
        length = self.batch_size if samples is None else min(self.batch_size, samples - start)
        part = length * (self.rank + 1) // self.world_size - length * self.rank // self.world_size
        return part * self.world_size / length

    def __iter__(self) -> Iterator[list[int]]:
        # DataLoaders with workers call iter() twice and read from the second: the place holds until one is read from.
        place, start, skip = self._place, 0, 0
        if place is not None:
            start = place[1]
            skip = self._tell_sampler(*place)
        indices = islice(iter(self.sampler), self._own(skip), None)
        if self.max_batches is not None:
            indices = islice(indices, self._own(max(0, self.max_batches * self.batch_size - start)))
        batches = self._placed(indices, self._epoch, start) if self.placed else self._batches(indices)
        return self._from(place, batches)

    def _from(self, place: Any, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        if self._place is place:
            self._place = None
        yield from batches

    def _batches(self, indices: Iterator[int]) -> Iterator[list[int]]:
        while batch := list(islice(indices, self.batch_size)):
            length = len(batch)
            if length < self.batch_size and self.drop_last:
                return
            yield batch[length * self.rank // self.world_size : length * (self.rank + 1) // self.world_size]

    def _placed(self, indices: Iterator[int], epoch: int, start: int) -> Iterator[list[int]]:
        while batch := list(islice(indices, self.batch_size)):
            length = len(batch)
            if length < self.batch_size and self.drop_last:
                return
            part = slice(length * self.rank // self.world_size, length * (self.rank + 1) // self.world_size)
            yield PlacedBatch(batch[part], epoch, range(start + part.start, start + part.stop))
            start += length

    def _own(self, samples: int) -> int:
        """How many of so many samples of all ranks the sampler yields on this one: all of them."""
        return samples

    def _samples(self) -> int | None:
        """Samples of an epoch, of all ranks; None: no end."""
        size = len(self.sampler) if hasattr(self.sampler, "__len__") else None
        if self.max_batches is None:
            return size
        limit = self.max_batches * self.batch_size
        return limit if size is None else min(size, limit)

    def __len__(self) -> int:
        number = self.batches_after(0)
        if number is None:
            return len(self.sampler)  # says itself that it has no length
        return number


class RankBatchSampler(GlobalBatchSampler):
    """Cuts what a sampler yields on this rank into this rank's batches.

    For samplers that share themselves out between ranks, every ``world_size``-th sample to each, as those of
    detectron2 and torch's DistributedSampler do. Positions are counted over all ranks here too.

    Args:
        sampler: yields the indices of this rank. ``set_epoch(epoch, start)``, where it has that, counts over all ranks.
        batch_size: samples of a global batch, a multiple of the number of ranks.
        drop_last: as in :class:`GlobalBatchSampler`.
        rank: as in :class:`GlobalBatchSampler`.
        world_size: as in :class:`GlobalBatchSampler`.
        placed: as in :class:`GlobalBatchSampler`.
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        placed: bool = False,
    ) -> None:
        super().__init__(sampler, batch_size, drop_last, rank, world_size, placed=placed)
        self._share = batch_size // self.world_size

    def share(self, start: int) -> float:
        return 1.0

    def _batches(self, indices: Iterator[int]) -> Iterator[list[int]]:
        while batch := list(islice(indices, self._share)):
            if len(batch) < self._share and self.drop_last:
                return
            yield batch

    def _placed(self, indices: Iterator[int], epoch: int, start: int) -> Iterator[list[int]]:
        world_size = self.world_size
        firsts = count(start + self.rank, self.batch_size)
        for first, batch in zip(firsts, self._batches(indices), strict=False):
            yield PlacedBatch(batch, epoch, range(first, first + len(batch) * world_size, world_size))

    def _own(self, samples: int) -> int:
        return samples // self.world_size

    def _samples(self) -> int | None:
        return len(self.sampler) * self.world_size if hasattr(self.sampler, "__len__") else None
