"""Hooks that change a run."""

from typing import Any

import torch

from hookline.hooks import HookBase


class OverrideLearningRate(HookBase):
    """Sets the learning rate to ``lr`` from iteration ``start`` on, instead of the schedule's."""

    after = ("LRScheduler",)

    def __init__(self, lr: float, start: int = 0) -> None:
        self.lr, self.start = lr, start

    def override(self, iteration: int) -> None:
        if iteration >= self.start:
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = self.lr

    def before_train(self) -> None:
        self.override(self.trainer.start_iter)

    def after_step(self) -> None:
        self.override(self.trainer.iter + 1)  # the schedule has just set the next step's


class FreezeUntil(HookBase):
    """Freezes parameters whose names begin with ``prefix`` until epoch ``epoch``."""

    def __init__(self, prefix: str, epoch: int) -> None:
        self.prefix, self.epoch = prefix, epoch

    def before_epoch(self) -> None:  # also called after a resume
        for name, parameter in self.trainer.model.named_parameters():
            if name.startswith(self.prefix):
                parameter.requires_grad_(self.trainer.epoch >= self.epoch)


class SaveOnLossSpike(HookBase):
    """Saves a checkpoint when the loss is ``factor`` times its running mean, for later inspection."""

    def __init__(self, factor: float = 3.0, momentum: float = 0.9) -> None:
        self.factor, self.momentum = factor, momentum
        self.mean: float | None = None

    def after_step(self) -> None:
        loss, _ = self.trainer.storage.latest()["total_loss"]
        if self.mean is None:
            self.mean = loss
        if loss > self.factor * self.mean:
            self.trainer.storage.put_text("spike", f"loss {loss:.3g}, {self.mean:.3g} before")
            self.trainer.request_save()
        self.mean = self.momentum * self.mean + (1 - self.momentum) * loss


class AverageWeights(HookBase):
    """Keeps a moving average of the parameters, and evaluates it in their place. Saves it."""

    def __init__(self, decay: float = 0.99) -> None:
        self.decay, self.average, self.swapped = decay, {}, False

    @torch.no_grad()
    def after_optimizer_step(self) -> None:
        for name, weight in self.trainer.model.named_parameters():
            self.average[name] = torch.lerp(self.average.get(name, weight).to(weight), weight, 1 - self.decay)

    def swap(self, *args: Any) -> None:
        self.swapped = not self.swapped
        for name, weight in self.trainer.model.named_parameters():
            average = self.average.get(name, weight.data).to(weight)  # a loaded one may be on another device
            weight.data, self.average[name] = average, weight.data

    before_eval = after_eval = swap

    def on_exception(self, error: BaseException) -> None:
        if self.swapped:  # the evaluation failed
            self.swap()

    def state_dict(self) -> dict[str, Any]:
        return self.average

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict
