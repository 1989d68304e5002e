"""Learning rate schedules of early versions of detectron2, as classes for torch optimizers.

For ported code: a config names schedules of ``schedules.py``.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["WarmupCosineLR", "WarmupMultiStepLR"]


class _WarmupLR(LRScheduler):
    """The initial learning rates times a warm-up's factor times a schedule's."""

    def __init__(
        self, optimizer: Optimizer, warmup_factor: float, warmup_iters: int, warmup_method: str, last_epoch: int
    ) -> None:
        self.warmup_factor = warmup_factor
        self.warmup_iters = warmup_iters
        self.warmup_method = warmup_method
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group at the current iteration."""
        warmup = _get_warmup_factor_at_iter(self.warmup_method, self.last_epoch, self.warmup_iters, self.warmup_factor)
        return [base_lr * warmup * self._factor(self.last_epoch) for base_lr in self.base_lrs]

    def _factor(self, iteration: int) -> float:
        raise NotImplementedError


class WarmupMultiStepLR(_WarmupLR):
    """Multiplies the learning rates by ``gamma`` at each milestone, after a warm-up.

    Args:
        optimizer: the optimizer.
        milestones: ascending iterations.
        gamma: the factor.
        warmup_factor: the factor at the first iteration.
        warmup_iters: length of the warm-up.
        warmup_method: "linear" or "constant".
        last_epoch: the last iteration; -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Sequence[int],
        gamma: float = 0.1,
        warmup_factor: float = 0.001,
        warmup_iters: int = 1000,
        warmup_method: str = "linear",
        last_epoch: int = -1,
    ) -> None:
        if list(milestones) != sorted(milestones):
            raise ValueError(f"milestones must be ascending, not {list(milestones)}")
        self.milestones = list(milestones)
        self.gamma = gamma
        super().__init__(optimizer, warmup_factor, warmup_iters, warmup_method, last_epoch)

    def _factor(self, iteration: int) -> float:
        return self.gamma ** bisect_right(self.milestones, iteration)


class WarmupCosineLR(_WarmupLR):
    """Decays the learning rates with a half cosine to 0 at ``max_iters``, after a warm-up.

    Args:
        optimizer: the optimizer.
        max_iters: length of the run.
        warmup_factor: as in :class:`WarmupMultiStepLR`, like the following.
        warmup_iters: likewise.
        warmup_method: likewise.
        last_epoch: likewise.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_iters: int,
        warmup_factor: float = 0.001,
        warmup_iters: int = 1000,
        warmup_method: str = "linear",
        last_epoch: int = -1,
    ) -> None:
        self.max_iters = max_iters
        super().__init__(optimizer, warmup_factor, warmup_iters, warmup_method, last_epoch)

    def _factor(self, iteration: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * iteration / self.max_iters))


def _get_warmup_factor_at_iter(method: str, iter: int, warmup_iters: int, warmup_factor: float) -> float:
    """Return the warm-up's factor of the learning rate at an iteration; 1 after the warm-up.

    Schedules of detectron2's projects call this function.
    """
    if iter >= warmup_iters:
        return 1.0
    if method == "constant":
        return warmup_factor
    if method == "linear":
        progress = iter / warmup_iters
        return warmup_factor * (1 - progress) + progress
    raise ValueError(f'unknown warm-up method {method!r}; use "linear" or "constant"')
