"""Cutting a stream of indices into the batches of each rank."""

import inspect
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from ...config import ConfigError
from .. import comm

__all__ = ["GlobalBatchSampler"]


class GlobalBatchSampler(Sampler[list[int]]):
    """Cuts a stream of indices into global batches and yields this rank's contiguous part of each.

    Args:
        sampler: yields the indices of all ranks, the same ones on every rank. If it has ``set_epoch(epoch, start)``
            it can begin anywhere at once; of others the part to be left out is read and thrown away.
        batch_size: samples of a global batch; it need not be a multiple of the number of ranks.
        drop_last: leave out what is left of a finite stream when no full batch can be made of it.
        rank: whose part. Default: this process.
        world_size: number of ranks. Default: those that there are.

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
    ) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank = comm.get_rank() if rank is None else rank
        self.world_size = comm.get_world_size() if world_size is None else world_size
        self._skip = 0
        if batch_size < self.world_size:
            raise ConfigError(
                f"DATALOADER.BATCH_SIZE is {batch_size}, fewer than one sample for each of {self.world_size} rank(s)"
            )
        last = len(sampler) % batch_size if hasattr(sampler, "__len__") and not drop_last else 0
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
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if set_epoch is None:
            self._skip = start
        elif "start" in inspect.signature(set_epoch).parameters:
            set_epoch(epoch, start)
        else:
            set_epoch(epoch)
            self._skip = start

    def __iter__(self) -> Iterator[list[int]]:
        skip, self._skip = self._skip, 0
        return self._batches(islice(iter(self.sampler), skip, None))  # takes the sampler's position now

    def _batches(self, indices: Iterator[int]) -> Iterator[list[int]]:
        while batch := list(islice(indices, self.batch_size)):
            length = len(batch)
            if length < self.batch_size and self.drop_last:
                return
            yield batch[length * self.rank // self.world_size : length * (self.rank + 1) // self.world_size]

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler), self.batch_size)
        return full + (rest > 0 and not self.drop_last)
