"""Hooks that observe a step without changing it."""

import time
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch

from hookline.hooks import Every, HookBase


class GradientNorm(HookBase):
    """Puts the norm of all gradients before (``norm/gradient``) and after clipping (``norm/clipped``)."""

    def put_norm(self, name: str) -> None:
        norms = [p.grad.norm() for p in self.trainer.model.parameters() if p.grad is not None]
        self.trainer.storage.put_scalar(name, torch.stack(norms).norm())

    def after_backward(self) -> None:
        self.put_norm("norm/gradient")

    def before_optimizer_step(self) -> None:
        self.put_norm("norm/clipped")


class WeightHistogram(HookBase):
    """Puts a histogram of each parameter, as ``weights/<name>``."""

    def __init__(self, period: int | str = "1ep") -> None:
        self.every = Every(period)

    def after_step(self) -> None:
        if self.every(self.trainer):
            with self.trainer.storage.name_scope("weights"):
                for name, parameter in self.trainer.model.named_parameters():
                    self.trainer.storage.put_histogram(name, parameter, bins=50)


class SampleImages(HookBase):
    """Puts the first images of a batch ``(images, labels)`` as the model gets them, after augmentation."""

    def __init__(self, count: int = 4, period: int | str = 500) -> None:
        self.count, self.every = count, Every(period)

    def after_fetch(self, batch: Any) -> None:
        if not self.every(self.trainer):
            return
        for number, image in enumerate(batch[0][: self.count]):
            low, high = image.min(), image.max()
            self.trainer.storage.put_image(f"input/{number}", (image - low) / (high - low).clamp(min=1e-6))


class SampleTexts(HookBase):
    """Periodically puts a text that ``write(model, prompt)`` returns."""

    def __init__(self, write: Callable[[Any, str], str], prompts: list[str], period: int | str = "1ep") -> None:
        self.write, self.prompts, self.every = write, prompts, Every(period, at_end=True)

    @torch.no_grad()
    def after_step(self) -> None:
        model, storage = self.trainer.model, self.trainer.storage
        if not self.every(self.trainer):
            return
        training = model.training
        model.eval()
        for prompt in self.prompts:
            storage.put_text(f"sample/{prompt}", self.write(model, prompt))
        model.train(training)


class PhaseTimer(HookBase):
    """Puts the seconds of each part of a step, as ``time/fetch`` etc., summed over micro-batches.

    On a GPU this is the time to launch the work; use torch.profiler for the work itself.
    """

    def before_step(self) -> None:
        self.seconds: dict[str, float] = {}

    def start(self, *args: Any) -> None:
        self.started = time.perf_counter()

    def stop(self, phase: str, *args: Any) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - self.started

    def after_step(self) -> None:
        self.trainer.storage.put_scalars(**{f"time/{phase}": seconds for phase, seconds in self.seconds.items()})

    before_fetch = before_forward = before_backward = before_optimizer_step = start
    after_fetch = partialmethod(stop, "fetch")
    after_forward = partialmethod(stop, "forward")
    after_backward = partialmethod(stop, "backward")
    after_optimizer_step = partialmethod(stop, "optimizer")
