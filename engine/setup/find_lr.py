"""The learning rate range test."""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...config import ConfigError
from ...hooks import CallbackHook
from .. import comm
from .probe import probing

__all__ = ["LRSweep", "find_lr"]


@dataclass(frozen=True)
class LRSweep:
    """Result of :func:`find_lr`.

    Attributes:
        lrs: the learning rates, in ascending order.
        losses: the loss of the step with each rate.
        smoothed: the losses' running average.
        suggestion: the rate at which the smoothed loss falls fastest; None if it does not fall.
    """

    lrs: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float | None

    def plot(self, path: str) -> None:
        """Draw the losses over the rates into an image file.

        Raises:
            ConfigError: matplotlib is not installed, or the file cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError("a plot needs matplotlib: pip install 'hookline[plot]'") from error
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.lrs, self.losses, alpha=0.3, label="loss")
        axes.plot(self.lrs, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="gray", linestyle="--", label=f"suggestion: {self.suggestion:.3g}")
        low, start = min(self.losses + self.smoothed), self.smoothed[0]
        span = (start - low) or abs(start) or 1.0  # the losses explode at the end, and would flatten the rest
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss", ylim=(low - span / 4, start + span / 2))
        axes.legend()
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the plot {path} cannot be written: {error}") from error


def find_lr(
    trainer: Any,
    min_lr: float = 1e-7,
    max_lr: float = 10.0,
    num_iter: int = 100,
    smoothing: float = 0.98,
    stop_factor: float | None = 4.0,
) -> LRSweep:
    """Train for some steps with a rising learning rate, and suggest a rate (Smith, arXiv:1506.01186, section 3.3).

    The rate rises exponentially; parameter groups keep the ratios of their rates. Model, optimizer, data and random
    generators are as before afterwards. Hooks are not called, and nothing is written.

    Args:
        trainer: a SimpleTrainer or DefaultTrainer that is not training. With several ranks, all of them call this.
        min_lr: the first rate.
        max_lr: the last rate.
        num_iter: number of steps.
        smoothing: factor of the running average, in [0, 1).
        stop_factor: stop when the smoothed loss is this many times its minimum, or not finite. None: only in the
            second case.

    Raises:
        ConfigError: an argument makes no sense, or the trainer has a loop or a step of its own.

    Example::

        sweep = find_lr(trainer)
        sweep.plot("lr.png")
        print(sweep.suggestion)
    """
    if not (0 < min_lr < max_lr and math.isfinite(max_lr)):
        raise ConfigError(f"find_lr: min_lr must be positive and less than max_lr; got {min_lr} and {max_lr}")
    if num_iter < 3 or not 0 <= smoothing < 1:
        raise ConfigError(
            f"find_lr: num_iter must be at least 3 and smoothing in [0, 1); got {num_iter} and {smoothing}"
        )
    rates = [min_lr * (max_lr / min_lr) ** (i / (num_iter - 1)) for i in range(num_iter)]
    lrs: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []
    factors: list[float] = []

    def set_rate(probe: Any) -> None:
        for group, factor in zip(probe.optimizer.param_groups, factors, strict=True):
            group["lr"] = rates[probe.iter] * factor

    def keep_loss(probe: Any) -> None:
        loss = float(np.mean(comm.all_gather(probe.storage.history("total_loss").latest())))
        if not math.isfinite(loss):
            probe.request_stop("the loss is not finite", everywhere=True)
            return
        before = smoothed[-1] * (1 - smoothing ** len(losses)) if losses else 0.0  # without the correction
        lrs.append(rates[probe.iter])
        losses.append(loss)
        smoothed.append((smoothing * before + (1 - smoothing) * loss) / (1 - smoothing ** len(losses)))
        if stop_factor is not None and smoothed[-1] > stop_factor * min(smoothed):
            probe.request_stop("the loss has risen", everywhere=True)

    with probing(trainer) as probe:
        own = [float(group.get("initial_lr", group["lr"])) for group in probe.optimizer.param_groups]
        cfg = getattr(trainer, "cfg", None)
        base = own[0] if cfg is None else cfg.SOLVER.BASE_LR
        factors = [rate / base if base else 1.0 for rate in own]
        probe.register_hooks([CallbackHook(before_step=set_rate, after_step=keep_loss)])
        with suppress(FloatingPointError):  # on a GPU
            probe._train(0, num_iter)
    return LRSweep(lrs, losses, smoothed, _steepest(lrs, smoothed))


def _steepest(lrs: list[float], losses: list[float]) -> float | None:
    """Return the rate at which the losses fall fastest over log(lr), without the first tenth, which is noise."""
    first = max(1, len(lrs) // 10)
    slopes = {
        i: (losses[i + 1] - losses[i - 1]) / math.log(lrs[i + 1] / lrs[i - 1]) for i in range(first, len(lrs) - 1)
    }
    best = min(slopes, key=slopes.__getitem__, default=None)
    return None if best is None or slopes[best] >= 0 else lrs[best]
