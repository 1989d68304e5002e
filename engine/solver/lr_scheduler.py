"""Learning rate schedules as factors of the base learning rate.

A schedule is a :class:`fvcore.common.param_scheduler.ParamScheduler`: called with the progress ``where`` in [0, 1], it
returns a factor. ``where`` is 1.0 after the last update, so schedules here are defined at 1.0, too.
"""

from typing import Any

from fvcore.common.param_scheduler import (
    ConstantParamScheduler,
    CosineParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
    StepParamScheduler,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...config import ConfigError
from ...hooks.common.models import BEFORE_END, value_at
from .schedules import FunctionSchedule
from .warmup_lr import WarmupCosineLR, WarmupMultiStepLR, _get_warmup_factor_at_iter  # noqa: F401 (as in detectron2)

__all__ = ["LRMultiplier", "LRScheduler", "WarmupCosineLR", "WarmupMultiStepLR", "WarmupParamScheduler"]

# Number of factors computed at a time, for schedules that depend on the progress alone. Schedules of other classes may
# change during a run, so they are called in each step.
_AHEAD = 64
_KNOWN = (
    ConstantParamScheduler,
    CosineParamScheduler,
    ExponentialParamScheduler,
    FunctionSchedule,
    LinearParamScheduler,
    MultiStepParamScheduler,
    StepParamScheduler,
)


class WarmupParamScheduler(ParamScheduler):
    """A warm-up followed by another schedule.

    Args:
        scheduler: the schedule after the warm-up.
        warmup_factor: the warm-up starts at this multiple of ``scheduler(0)``.
        warmup_length: length of the warm-up as a fraction of the run, in [0, 1].
        warmup_method: "linear" or "exponential" rises to the value of ``scheduler`` at the end of the warm-up;
            "constant" stays at the start value.
        rescale_interval: compress the whole ``scheduler`` into the rest of the run. Otherwise the warm-up replaces its
            first part.

    Raises:
        ValueError: unknown method or impossible length.
    """

    def __init__(
        self,
        scheduler: ParamScheduler,
        warmup_factor: float,
        warmup_length: float,
        warmup_method: str = "linear",
        rescale_interval: bool = False,
    ) -> None:
        if not 0.0 <= warmup_length <= 1.0:
            raise ValueError(f"warmup_length must be a fraction of the run, in [0, 1], not {warmup_length}")
        start = warmup_factor * scheduler(0.0)
        end = scheduler(0.0) if rescale_interval else value_at(scheduler, warmup_length)
        if warmup_method == "linear":
            self._warmup: ParamScheduler = LinearParamScheduler(start, end)
        elif warmup_method == "constant":
            self._warmup = ConstantParamScheduler(start)
        elif warmup_method == "exponential":
            if start <= 0 or end <= 0:
                raise ValueError(f"an exponential warm-up cannot rise from {start} to {end}: both must be positive")
            self._warmup = ExponentialParamScheduler(start, end / start)
        else:
            raise ValueError(f'unknown warmup_method {warmup_method!r}; use "linear", "constant" or "exponential"')
        self._scheduler = scheduler
        self._length = warmup_length
        self._rescale = rescale_interval

    def __call__(self, where: float) -> float:
        if where < self._length:
            return self._warmup(where / self._length)
        if self._rescale and self._length < 1.0:
            where = min((where - self._length) / (1.0 - self._length), 1.0)
        # value_at() is slower and only needed at the end.
        return self._scheduler(where) if where < BEFORE_END else value_at(self._scheduler, where)


class LRMultiplier(LRScheduler):
    """A torch scheduler that multiplies each group's initial learning rate by a schedule's factor.

    Call ``step()`` once after each update. After ``max_iter`` updates the factor stays at its last value. The initial
    rate of a group that is added to the optimizer later is the rate it was added with.

    Schedules of hookline and fvcore depend on the progress alone; 64 factors are computed at a time. A change inside
    such an object therefore takes effect up to 64 iterations later. Schedules of other classes are called in each step.

    Args:
        optimizer: the optimizer.
        multiplier: factor as a function of progress.
        max_iter: number of updates in the whole run.
        last_iter: number of the last update; -1 for a new run.
    """

    def __init__(self, optimizer: Optimizer, multiplier: ParamScheduler, max_iter: int, last_iter: int = -1) -> None:
        if not isinstance(multiplier, ParamScheduler):
            raise TypeError(f"multiplier must be a fvcore ParamScheduler, not {multiplier!r}")
        if max_iter < 1:
            raise ValueError(f"max_iter must be positive, not {max_iter}")
        self._factors: dict[int, float] = {}  # precomputed, by iteration
        self._multiplier = multiplier
        self._max_iter = max_iter
        super().__init__(optimizer, last_epoch=last_iter)

    # detectron2's names. Setting them during a run changes the schedule and discards precomputed factors.

    @property
    def _multiplier(self) -> ParamScheduler:
        return self._schedule

    @_multiplier.setter
    def _multiplier(self, schedule: ParamScheduler) -> None:
        self._schedule = schedule
        self._ahead = _AHEAD if _is_known(schedule) else 1
        self._factors.clear()

    @property
    def _max_iter(self) -> int:
        return self._updates

    @_max_iter.setter
    def _max_iter(self, updates: int) -> None:
        self._updates = updates
        self._factors.clear()

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group at the current iteration."""
        factor = self._factors.get(self.last_epoch)
        if factor is None:
            factor = self._precompute(self.last_epoch)
        return [base_lr * factor for base_lr in self.base_lrs]

    def _precompute(self, iteration: int) -> float:
        """Return the factor at ``iteration``, and keep the following ones.

        Many at once take less time than one per step: in the step of a small model this code is not in the CPU cache.
        """
        factor = self._factor(iteration)
        following = range(iteration + 1, min(iteration + self._ahead, self._max_iter + 1))
        self._factors = {it: self._factor(it) for it in following}
        return factor

    def _factor(self, iteration: int) -> float:
        where = iteration / self._max_iter
        return self._multiplier(where) if where < BEFORE_END else value_at(self._multiplier, where)

    def step(self, epoch: int | None = None) -> None:
        """Advance by one iteration. Skips the checks of torch's ``step`` after the first call.

        Raises:
            ConfigError: groups were removed from the optimizer.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_lrs):
            self._add_groups(groups)
        fast = epoch is None and self._step_count > 1
        for group in groups:  # torch's step changes a tensor in place
            fast = fast and type(group["lr"]) is float
        if not fast:
            super().step(epoch)
            return
        self._step_count += 1
        self.last_epoch += 1
        self._last_lr = self.get_lr()
        for group, lr in zip(groups, self._last_lr, strict=True):
            group["lr"] = lr

    def _add_groups(self, groups: list[dict[str, Any]]) -> None:
        """Add the groups that were added to the optimizer since the last step. They come last."""
        known = len(self.base_lrs)
        if len(groups) < known:
            raise ConfigError(
                f"the optimizer has {len(groups)} parameter groups, and had {known} when its learning rates were "
                "last set: after removing groups, make a new scheduler"
            )
        for group in groups[known:]:
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"]))

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers; the schedule itself is rebuilt from the config."""
        return {"base_lrs": list(self.base_lrs), "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a position. The optimizer's learning rates are part of the optimizer's state and do not change."""
        self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = state_dict["last_epoch"]
        self._factors.clear()
        self._last_lr = self.get_lr()


def _is_known(schedule: ParamScheduler) -> bool:
    """Return whether a schedule is known to depend on the progress alone."""
    while type(schedule) is WarmupParamScheduler:
        schedule = schedule._scheduler
    return type(schedule) in _KNOWN
