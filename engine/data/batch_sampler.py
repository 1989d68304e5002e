"""Split a stream of indices into the batches of each rank."""

import inspect
import random
from collections import deque
from collections.abc import Iterator
from itertools import count, islice
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import Sampler

from ...config import ConfigError
from ...hooks.common import length_of
from .. import comm
from .seeding import ORDER, seeded, stream_key

# Indices that are drawn at once: seeding and restoring the generators for them takes 150 µs.
_AHEAD = 4096


def takes_start(sampler: Any) -> bool:
    """Whether a sampler or data source has ``set_epoch(epoch, start)``: it can begin in the middle of an epoch.

    A subclass that overrides only ``__iter__`` does not read the start, so it cannot.
    """
    set_epoch = getattr(sampler, "set_epoch", None)
    if set_epoch is None or "start" not in inspect.signature(set_epoch).parameters:
        return False
    for cls in type(sampler).__mro__:
        if vars(cls).keys() & {"set_epoch", "__iter__"}:
            return "set_epoch" in vars(cls) or "set_epoch" in vars(sampler)
    return True


def has_state(source: Any) -> bool:
    """Whether a loader or data source saves its position by ``state_dict()`` and ``load_state_dict()``."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


class PlacedBatch(list[int]):
    """This rank's indices of a batch, with the position of each sample in the stream.

    Attributes:
        epoch: number of the stream.
        places: position of each sample, counted over all ranks.
        total: number of samples in the batch over all ranks.
    """

    __slots__ = ("epoch", "places", "total")

    def __init__(self, indices: list[int], epoch: int, places: range, total: int) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.places = places
        self.total = total

    def __reduce__(self) -> Any:  # sent to workers with every batch; faster than pickling slots
        return type(self), (list(self), self.epoch, self.places, self.total)


class GlobalBatchSampler(Sampler[list[int]]):
    """Splits a stream of indices into global batches and yields this rank's contiguous part of each, a
    :class:`PlacedBatch`.

    Args:
        sampler: yields the indices of all ranks. Its random draws, from the global generators of Python, NumPy and
            torch (CPU) or a generator that is its attribute, are seeded by seed and epoch: they are the same on every
            rank and after a resume. With ``set_epoch(epoch, start)`` it starts at a position directly. Otherwise the
            indices before the position are drawn and skipped.
        batch_size: samples per global batch; need not be a multiple of the number of ranks.
        drop_last: drop the last batch of an epoch if it is not full.
        rank: the rank to yield batches for. Default: this process's data rank.
        world_size: number of ranks. Default: the number of data ranks.
        seed: of the sampler's draws, the same on all ranks.
        seeds_own: whether generators that are attributes of the sampler are seeded.

    Attributes:
        noted: gets each batch that is yielded, if it is not None.
        order: a checksum of the first batch of the last pass, over all ranks.

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
        seed: int = 0,
        seeds_own: bool = True,
    ) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank = comm.get_data_rank() if rank is None else rank
        self.world_size = comm.get_data_size() if world_size is None else world_size
        self.seed = seed
        self.seeds_own = seeds_own
        self.noted: deque[PlacedBatch] | None = None
        self.order = 0
        self._epoch = 0
        self._start: int | None = None  # of the next pass, until its first batch
        if batch_size < self.world_size:
            raise ConfigError(
                f"DATALOADER.BATCH_SIZE is {batch_size}, fewer than one sample for each of {self.world_size} rank(s)"
            )
        samples = length_of(self.sampler)
        last = 0 if samples is None or drop_last else samples % batch_size
        if 0 < last < self.world_size:
            raise ConfigError(
                f"the last batch of an epoch would be {last} sample(s) for {self.world_size} ranks: "
                "set DATALOADER.DROP_LAST to True, or change DATALOADER.BATCH_SIZE"
            )

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the position of the next pass.

        Args:
            epoch: passed to the sampler.
            start: samples of the epoch, over all ranks, to skip.
        """
        self._epoch, self._start = epoch, start

    def batches_after(self, start: int) -> int | None:
        """Batches left in an epoch after ``start`` samples; None if it has no end."""
        samples = length_of(self.sampler)
        if samples is None:
            return None
        full, rest = divmod(max(0, samples - start), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self.order = self._epoch, 0
        noted, self.noted = self.noted, None  # of this pass, and of no other that somebody begins
        for place, batch in self._global_batches():
            self.order = self.order or crc32(repr(batch).encode())
            total = len(batch)
            first, end = total * self.rank // self.world_size, total * (self.rank + 1) // self.world_size
            mine = PlacedBatch(batch[first:end], epoch, range(place + first, place + end), total)
            if noted is not None:
                noted.append(mine)
            yield mine

    def _global_batches(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the position and the indices of each batch over all ranks, from the position that was set."""
        # DataLoaders with workers call iter() twice and read the second: the position is used by the first batch.
        epoch, place, skip = self._epoch, self._start or 0, 0
        if self._start is not None:
            if takes_start(self.sampler):
                self.sampler.set_epoch(epoch, place)
            else:
                skip = place
                if hasattr(self.sampler, "set_epoch"):
                    self.sampler.set_epoch(epoch)
            self._start = None
        indices = islice(_drawn(self.sampler, stream_key(self.seed, epoch, ORDER), self.seeds_own), skip, None)
        while batch := list(islice(indices, self.batch_size)):
            if len(batch) < self.batch_size and self.drop_last:
                return
            yield place, batch
            place += len(batch)

    def __len__(self) -> int:
        number = self.batches_after(0)
        if number is None:
            return len(self.sampler)  # raises TypeError
        return number


def _drawn(sampler: Any, key: int, seeds_own: bool) -> Iterator[int]:
    """``iter(sampler)`` with the global generators and its own seeded by ``key``; they do not change for others."""
    if type(sampler).__module__ in (f"{__package__}.samplers", f"{__package__}.mixing"):  # with generators of their own
        return iter(sampler)
    return _drawn_ahead(sampler, key, seeds_own)


def _drawn_ahead(sampler: Any, key: int, seeds_own: bool) -> Iterator[int]:
    indices: Any = None
    for number in count():
        with seeded(key, number):
            if indices is None:
                if seeds_own:
                    _seed_own(sampler, key)
                indices = iter(sampler)
            ahead = list(islice(indices, _AHEAD))
        yield from ahead
        if len(ahead) < _AHEAD:
            return


def _seed_own(sampler: Any, key: int) -> None:
    """Seed the generators that are attributes of a sampler."""
    for own in getattr(sampler, "__dict__", {}).values():
        if isinstance(own, torch.Generator):
            own.manual_seed(key >> 1)
        elif isinstance(own, random.Random | np.random.RandomState):
            own.seed(key >> 32)
        elif isinstance(own, np.random.Generator):
            own.bit_generator.state = type(own.bit_generator)(key).state
