"""Batches of samples from one group, by detectron2's class."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import BatchSampler, Sampler

__all__ = ["GroupedBatchSampler"]


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
        if not isinstance(sampler, Sampler):
            raise ValueError(f"GroupedBatchSampler takes a torch Sampler, not {sampler!r}")
        self.sampler = sampler
        self.group_ids = np.asarray(group_ids)
        if self.group_ids.ndim != 1:
            raise ValueError(f"group_ids must be one number per sample, not an array of {self.group_ids.shape}")
        self.batch_size = batch_size
        self.buffer_per_group: dict[int, list[int]] = {group: [] for group in np.unique(self.group_ids).tolist()}

    def __iter__(self) -> Iterator[list[int]]:
        for index in self.sampler:
            batch = self.buffer_per_group[int(self.group_ids[index])]
            batch.append(index)
            if len(batch) == self.batch_size:
                full = batch[:]
                batch.clear()  # before the yield: a reader may stop here
                yield full

    def __len__(self) -> int:
        raise TypeError("the number of batches of a GroupedBatchSampler is not known")
