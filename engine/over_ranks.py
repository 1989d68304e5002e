"""What makes one rank's step a part of the step over the global batch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..hooks.batches import samples_in
from . import comm
from .data.batch_sampler import GlobalBatchSampler
from .data.epoch_iterator import EpochIterator
from .data.stream import StreamLoader

__all__ = ["OverRanks"]


class OverRanks:
    """Weighs a rank's losses, and finds out together what only one rank sees, where ranks average gradients.

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
            return 1.0 if mine is None else mine / self.mean(mine)
        return 1.0

    def mean(self, count: Any) -> Any:
        """The mean over ranks of a count, 1 if nothing was counted: what counts are divided by."""
        total = comm.all_reduce_sum(count)
        if isinstance(total, torch.Tensor):
            return torch.where(total > 0, total / self.world_size, 1.0)
        return total / self.world_size if total else 1.0

    def weigh(self, trainer: Any, batch: Any) -> Callable[[Any], Any]:
        """The factor that the losses of a whole batch count with, as a function of the items they are means over."""

        def factor(num_items: Any) -> Any:
            if num_items is None:
                return self.share(trainer._batches, batch)
            trainer.storage.put_scalar("num_items", num_items, smoothing_hint=False)
            return num_items / self.mean(num_items)

        return factor

    def nonfinite(self, trainer: Any, found: FloatingPointError | None) -> FloatingPointError | None:
        """Whether a loss of this step is NaN or infinite on any rank: all ranks get the same answer.

        Gradients are what all ranks share: one that is not finite on any rank has made them so on all. Only then do
        they ask each other. A loss that no gradient depends on leaves them finite: then the rank that found it acts
        alone. It fails by the policy "raise", which ends all; asks all to stop by "stop", which they do within about a
        second; and by "skip" there is nothing to skip.

        Args:
            trainer: its gradients are final. On a GPU, and with a gradient scaler, the answer is not waited for.
            found: what this rank found of its own losses.

        Returns:
            An error that names the rank, or None; the same on all ranks, but for such a loss.
        """
        if trainer.grad_scaler is not None:
            return None
        groups = trainer.optimizer.param_groups
        gradients = [parameter.grad for group in groups for parameter in group["params"] if parameter.grad is not None]
        if not gradients or gradients[0].device.type != "cpu":
            return None
        if torch.stack([norm.float() for norm in torch._foreach_norm(gradients)]).isfinite().all():
            return None if found is None else self._found_alone(trainer, found)
        messages: list[str | None] = comm.all_gather(None if found is None else str(found))
        bad = [(rank, message) for rank, message in enumerate(messages) if message is not None]
        if not bad:  # finite losses, and gradients that are not: the next losses will tell
            return None
        others = f" (and on {len(bad) - 1} other ranks)" if len(bad) > 1 else ""
        return FloatingPointError(f"on rank {bad[0][0]}{others} {bad[0][1]}")

    def _found_alone(self, trainer: Any, found: FloatingPointError) -> FloatingPointError | None:
        what = f"on rank {comm.get_rank()} {found}"
        if trainer.nonfinite.policy == "raise":
            return FloatingPointError(what)
        if trainer.nonfinite.policy == "stop":
            trainer.request_stop(what)
        return None


def names_to_share(losses: Mapping[str, Any], prefix: str = "") -> set[str]:
    """The metrics that ``write_metrics`` puts for these losses, and that are means over all ranks."""
    return {prefix + name for name in (*losses, "total_loss")}
