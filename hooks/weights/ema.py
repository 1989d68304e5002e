"""Exponential moving average of the weights."""

import logging
from typing import Literal

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY
from ..common.models import unwrap_model
from .averaging import WeightAveraging

__all__ = ["EMA", "EMAHook"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class EMA(WeightAveraging):
    """Keeps an exponential moving average of the weights (Polyak averaging), and evaluates it.

    It starts as a copy of the weights before iteration ``start``. Update n (from 0) is
    ``average = d * average + (1 - d) * weights`` with ``d = decay``, or ``d = min(decay, (1 + n) / (10 + n))`` with
    ``warmup``, so that the first weights soon lose their influence. Saves ``averaged_model`` and ``updates``. A
    resumed run uses the ``decay`` of its config.

    Acts in ``after_step``, or before that in ``before_eval`` and ``before_save``; see :class:`WeightAveraging`.

    Args:
        decay: from 0 to below 1. 0.999 averages over about the last thousand updates.
        warmup: whether to start with a smaller decay, as above.
        every: how often to update: a duration. ``decay`` applies to one update.
        start: a duration in iterations or epochs, or a fraction of the run between 0 and 1.
        buffers: "copy" uses the model's buffers, "average" averages them like weights. Integer buffers are always
            copied.
        device: the device of the average; "cpu" saves GPU memory, but each update then waits for the GPU: use
            ``every``. None: that of the weights.
        evaluate: whether evaluations use the average.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992); warm-up as in
    TensorFlow's ``ExponentialMovingAverage``.
    """

    def __init__(
        self,
        decay: float = 0.999,
        warmup: bool = True,
        every: "Duration | int | str" = 1,
        start: "Duration | int | float | str" = 0,
        buffers: Literal["copy", "average"] = "copy",
        device: str | None = None,
        evaluate: bool = True,
    ) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"EMA: decay must be at least 0 and less than 1, not {decay!r}")
        if buffers not in ("copy", "average"):
            raise ConfigError(f'EMA: buffers must be "copy" or "average", not {buffers!r}')
        super().__init__(start, every, device, evaluate)
        self.decay = decay
        self.warmup = warmup
        self.buffers = buffers

    def averages_buffer(self, module: nn.Module, name: str) -> bool:
        return self.buffers == "average"

    def before_train(self) -> None:
        super().before_train()
        trainer = self.trainer
        model = unwrap_model(trainer.model)
        # Weights of lazy modules get their shape from the first batch.
        lazy = any(is_lazy(weight) for weight in (*model.parameters(), *model.buffers()))
        if self.average is None and trainer.start_iter >= self._first and not lazy:
            if trainer.start_iter:
                logger.info("EMA: no average was loaded: it starts with the model's current weights")
            self._begin()

    def after_step(self) -> None:
        super().after_step()
        if self.average is None and self.trainer.iter + 1 >= self._first:
            self._begin()

    def step(self) -> None:
        if self.average is None:
            return
        n = self.updates
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        self.average.update(get_ema_multi_avg_fn(decay), n)
        self.updates = n + 1


EMAHook = HOOK_REGISTRY.register(EMA, name="EMAHook")
"""Another common name of :class:`EMA`."""
