"""Hooks with a custom event: one emits it, the other listens."""

from typing import Any

import torch

from hookline.hooks import HookBase


class VerifyBatches(HookBase):
    """Emits ``verify_batch(batch)`` for the first ``steps`` batches of a run."""

    def __init__(self, steps: int = 10) -> None:
        self.steps = steps

    def after_fetch(self, batch: Any) -> None:
        if self.trainer.iter < self.trainer.start_iter + self.steps:
            self.trainer.emit("verify_batch", batch)


class FiniteInputs(HookBase):
    """Raises an error for a batch ``(x, y)`` that contains NaN or infinity."""

    def verify_batch(self, batch: Any) -> None:
        if not torch.isfinite(batch[0]).all():
            raise ValueError(f"a batch has {int((~torch.isfinite(batch[0])).sum())} values that are not finite")
