"""What makes one rank's step a part of the step over the global batch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...hooks.common.batches import samples_in
from .. import comm
from ..data.batch_sampler import GlobalBatchSampler
from ..data.epoch_iterator import EpochIterator
from ..data.stream import StreamLoader

__all__ = ["OverRanks"]


class OverRanks:
    """Weights a rank's losses where ranks average gradients.

    The mean over ranks of gradients is that of the loss over the global batch if each rank's loss, a mean over its
    own samples (or items), counts by their number: times the number of ranks, over the number in the global batch.
    The logged losses are weighed alike, so their mean over ranks is the loss of the global batch.
    """

    def __init__(self) -> None:
        self.world_size = comm.get_world_size()

    def share(self, batches: EpochIterator, batch: Any) -> float:
        """This rank's samples in the batch read last, over the mean number of samples on all ranks.

        For loaders with a :class:`GlobalBatchSampler` the position tells; for streams the ranks ask each other. Other
        loaders are taken to give all ranks the same number.
        """
        sampler = getattr(batches.loader, "batch_sampler", None)
        if isinstance(sampler, GlobalBatchSampler):
            return sampler.share(batches.samples_before)
        if isinstance(batches.loader, StreamLoader):
            mine = samples_in(batch)
            return 1.0 if mine is None else mine / self.mean(comm.all_reduce_sum(mine))
        return 1.0

    def mean(self, total: Any) -> Any:
        """The mean over ranks of a count that is ``total`` on all of them, or 1 if that is 0: a divisor."""
        if isinstance(total, torch.Tensor):
            return torch.where(total > 0, total / self.world_size, 1.0)
        return total / self.world_size if total else 1.0

    def in_batch(self, total: Any) -> Any:
        """The count in the global batch, of one that is ``total`` over all ranks: some ranks may share their part."""
        sharing = self.world_size // comm.get_data_size()
        return total if sharing == 1 else total / sharing

    def weigh(self, trainer: Any, batch: Any) -> Callable[[Any], Any]:
        """The factor that the losses of a whole batch count with, as a function of the items they are means over."""

        def factor(num_items: Any) -> Any:
            if num_items is None:
                return self.share(trainer._batches, batch)
            total = comm.all_reduce_sum(num_items)
            trainer.storage.put_scalar("num_items", self.in_batch(total), smoothing_hint=False)
            return num_items / self.mean(total)

        return factor


def names_to_share(losses: Mapping[str, Any], prefix: str = "") -> set[str]:
    """The metrics that ``write_metrics`` puts for these losses, and that are means over all ranks."""
    return {prefix + name for name in (*losses, "total_loss")}
