"""Hooks with an event of their own: one emits it, any number listen."""

from typing import Any

import torch

from hookline.hooks import HookBase


class VerifyBatches(HookBase):
    """Has the first ``steps`` batches of a run looked at: every hook with a ``verify_batch(batch)`` is asked."""

    def __init__(self, steps: int = 10) -> None:
        self.steps = steps

    def after_fetch(self, batch: Any) -> None:
        if self.trainer.iter < self.trainer.start_iter + self.steps:
            self.trainer.emit("verify_batch", batch)


class FiniteInputs(HookBase):
    """Refuses batches ``(x, y)`` with NaN or infinity in them."""

    def verify_batch(self, batch: Any) -> None:
        if not torch.isfinite(batch[0]).all():
            raise ValueError(f"a batch has {int((~torch.isfinite(batch[0])).sum())} values that are not finite")


class CountClasses(HookBase):
    """Counts the labels of the batches it is shown, and puts the share of the rarest class."""

    def __init__(self, num_classes: int) -> None:
        self.counts = torch.zeros(num_classes)

    def verify_batch(self, batch: Any) -> None:
        self.counts += torch.bincount(batch[1].cpu(), minlength=len(self.counts))
        self.trainer.storage.put_scalar("data/rarest_class", self.counts.min() / self.counts.sum())
