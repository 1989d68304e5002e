"""Hooks that evaluate the model during training."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hookline.hooks import Every, HookBase, has_event_storage


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


class ConfusionMatrix(HookBase):
    """Counts predictions by class on batches ``(x, y)``: ``matrix[truth, prediction]``.

    Puts the recall of each class, and the matrix as an image.
    """

    def __init__(self, num_classes: int) -> None:
        self.matrix = torch.zeros(num_classes, num_classes)

    def before_eval(self) -> None:
        self.matrix.zero_()

    def after_eval_step(self, batch: Any, outputs: torch.Tensor) -> None:
        for truth, prediction in zip(batch[1].tolist(), outputs.argmax(1).tolist(), strict=True):
            self.matrix[truth, prediction] += 1

    def after_eval(self, results: Mapping[str, Any]) -> None:
        self.matrix = sum(self.trainer.comm.all_gather(self.matrix))  # each rank has its own part
        if not has_event_storage():  # an evaluation without training
            return
        rates = self.matrix / self.matrix.sum(1, keepdim=True).clamp(min=1)
        recalls = {f"recall/{number}": rate for number, rate in enumerate(rates.diagonal().tolist())}
        self.trainer.storage.put_scalars(**recalls, smoothing_hint=False)
        self.trainer.storage.put_image("confusion", rates.unsqueeze(0))
