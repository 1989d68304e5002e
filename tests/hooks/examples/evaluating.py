"""Hooks that evaluate the model during training."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hookline.hooks import Every, HookBase


class ValidationLoss(HookBase):
    """Puts the mean loss over held-out batches, as ``validation/loss``.

    ``loss(model, batch)`` returns the loss of one batch of ``loader``.
    """

    def __init__(self, loader: Iterable[Any], loss: Callable[..., torch.Tensor], period: int | str = "1ep") -> None:
        self.loader, self.loss = loader, loss
        self.every = Every(period, at_end=True)

    def before_train(self) -> None:
        self.every.start()

    def after_step(self) -> None:
        if self.every(self.trainer):
            self.validate(self.trainer.model)

    @torch.no_grad()
    def validate(self, model: torch.nn.Module) -> None:
        training = model.training
        model.eval()
        losses = [self.loss(model, batch) for batch in self.loader]
        model.train(training)
        self.trainer.storage.put_scalar("validation/loss", torch.stack(losses).mean(), smoothing_hint=False)
