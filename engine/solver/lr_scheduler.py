"""Learning rate schedules by detectron2's names: those of :mod:`hookline.hooks`, and classes of its early versions.

A config names schedules of ``schedules.py``.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.lr_scheduler import LRScheduler as LRScheduler

from ...hooks.builtin.lr_scheduler import LRMultiplier as LRMultiplier
from ...hooks.builtin.lr_scheduler import WarmupParamScheduler as WarmupParamScheduler

_ARGUMENTS = ("milestones", "gamma", "max_iters", "warmup_factor", "warmup_iters", "warmup_method")


class _WarmupLR(LambdaLR):
    def state_dict(self) -> dict[str, object]:
        # A resumed run has the arguments of its config.
        return {name: value for name, value in super().state_dict().items() if name not in _ARGUMENTS}


class WarmupMultiStepLR(_WarmupLR):
    """Multiplies the learning rates by ``gamma`` at each milestone, after a warm-up. Attributes have the names of the
    arguments.

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

        self.milestones, self.gamma = milestones, gamma
        self.warmup_factor, self.warmup_iters, self.warmup_method = warmup_factor, warmup_iters, warmup_method

        def factor(iteration: int) -> float:
            warmup = _get_warmup_factor_at_iter(self.warmup_method, iteration, self.warmup_iters, self.warmup_factor)
            return float(warmup * self.gamma ** bisect_right(self.milestones, iteration))

        super().__init__(optimizer, factor, last_epoch)


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
        self.warmup_factor, self.warmup_iters, self.warmup_method = warmup_factor, warmup_iters, warmup_method

        def factor(iteration: int) -> float:
            warmup = _get_warmup_factor_at_iter(self.warmup_method, iteration, self.warmup_iters, self.warmup_factor)
            return warmup * 0.5 * (1.0 + math.cos(math.pi * iteration / self.max_iters))

        super().__init__(optimizer, factor, last_epoch)


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
