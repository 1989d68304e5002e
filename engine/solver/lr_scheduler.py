"""Learning rate schedules: factors of the base learning rate as a function of the run's progress.

A schedule is a :class:`fvcore.common.param_scheduler.ParamScheduler`: called with ``where`` in [0, 1], it returns
a factor. 1.0 is reached after the last update, so every schedule here is defined there too.
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
from .schedules import FunctionSchedule

__all__ = ["LRMultiplier", "WarmupParamScheduler"]

# Factors computed at a time, of schedules known to depend on the progress alone: one of somebody else's class may
# change in the course of a run, and is asked in each step.
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

BEFORE_END = 1 - 2 * ParamScheduler.WHERE_EPSILON
"""The last point at which fvcore's stepwise schedules (they add the epsilon) are defined."""


class WarmupParamScheduler(ParamScheduler):
    """A warm-up followed by another schedule.

    Args:
        scheduler: what follows.
        warmup_factor: the warm-up begins at this multiple of ``scheduler(0)``.
        warmup_length: share of the run, in [0, 1], that the warm-up takes.
        warmup_method: "linear" rises evenly to where ``scheduler`` goes on; "exponential" rises by a constant
            ratio; "constant" stays.
        rescale_interval: squeeze the whole of ``scheduler`` into what the warm-up leaves. Otherwise its first
            part is replaced.

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
            raise ValueError(f"warmup_length is a share of the run, in [0, 1], not {warmup_length}")
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
        # In this way up to the last step, each of which comes here: value_at() is for the end.
        return self._scheduler(where) if where < BEFORE_END else value_at(self._scheduler, where)


class LRMultiplier(LRScheduler):
    """A torch scheduler that sets each group's learning rate to its initial one times a schedule's factor.

    Call ``step()`` once after each update. After ``max_iter`` updates the schedule stays at its end. A group that is
    added to the optimizer on the way has the rate it was added with as its initial one.

    Of schedules that depend on the progress alone, as hookline's and fvcore's do, 64 factors are computed at a time:
    what is changed inside such an object in the course of a run counts up to 64 iterations later. One of a class of
    your own is asked in each step.

    Args:
        optimizer: whose learning rates.
        multiplier: factor as a function of progress.
        max_iter: updates of the whole run.
        last_iter: number of the last update made; -1 for a new run.
    """

    def __init__(self, optimizer: Optimizer, multiplier: ParamScheduler, max_iter: int, last_iter: int = -1) -> None:
        if not isinstance(multiplier, ParamScheduler):
            raise TypeError(f"multiplier must be a fvcore ParamScheduler, not {multiplier!r}")
        if max_iter < 1:
            raise ValueError(f"max_iter must be positive, not {max_iter}")
        self._factors: dict[int, float] = {}  # by iteration: some that follow
        self._multiplier = multiplier
        self._max_iter = max_iter
        super().__init__(optimizer, last_epoch=last_iter)

    # detectron2's names, which code sets to move a schedule in the course of a run: what was computed ahead is void.

    @property
    def _multiplier(self) -> ParamScheduler:
        return self._schedule

    @_multiplier.setter
    def _multiplier(self, schedule: ParamScheduler) -> None:
        self._schedule = schedule
        self._ahead = _AHEAD if _depends_on_progress_alone(schedule) else 1
        self._factors.clear()

    @property
    def _max_iter(self) -> int:
        return self._updates

    @_max_iter.setter
    def _max_iter(self, updates: int) -> None:
        self._updates = updates
        self._factors.clear()

    def get_lr(self) -> list[Any]:
        """The learning rate of each group at the present iteration."""
        factor = self._factors.get(self.last_epoch)
        if factor is None:
            factor = self._look_ahead(self.last_epoch)
        return [base_lr * factor for base_lr in self.base_lrs]

    def _look_ahead(self, iteration: int) -> float:
        """The factor at ``iteration``. Those that follow are kept with it: many at once take less time than one each.

        A step of a small model evicts from the processor's caches what is called once in it.
        """
        factor = self._factor(iteration)
        following = range(iteration + 1, min(iteration + self._ahead, self._max_iter + 1))
        self._factors = {it: self._factor(it) for it in following}
        return factor

    def _factor(self, iteration: int) -> float:
        where = iteration / self._max_iter
        return self._multiplier(where) if where < BEFORE_END else value_at(self._multiplier, min(where, 1.0))

    def step(self, epoch: int | None = None) -> None:
        """Go on to the next iteration. After the first call, which is torch's, without its checks of every call.

        Raises:
            ConfigError: groups were taken out of the optimizer.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_lrs):
            self._take_in(groups)
        usual = epoch is None and self._step_count > 1
        for group in groups:  # a tensor, say, is changed in place
            usual = usual and type(group["lr"]) is float
        if not usual:
            super().step(epoch)
            return
        self._step_count += 1
        self.last_epoch += 1
        self._last_lr = self.get_lr()
        for group, lr in zip(groups, self._last_lr, strict=True):
            group["lr"] = lr

    def _take_in(self, groups: list[dict[str, Any]]) -> None:
        """Add the groups that have come to the optimizer since the last step; it puts them behind the others."""
        known = len(self.base_lrs)
        if len(groups) < known:
            raise ConfigError(
                f"the optimizer has {len(groups)} parameter groups, and had {known} when its learning rates were "
                "last set: make a new scheduler for it when groups are taken out"
            )
        for group in groups[known:]:
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"]))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; the schedule itself comes from the config."""
        return {"base_lrs": list(self.base_lrs), "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a saved position. The optimizer's learning rates are in its own state, and are left alone."""
        self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = state_dict["last_epoch"]
        self._factors.clear()
        self._last_lr = self.get_lr()


def value_at(schedule: ParamScheduler, where: float) -> float:
    """A schedule's value, also at the end, where fvcore's constant and stepwise ones raise."""
    try:
        return schedule(where)
    except (IndexError, RuntimeError):
        if where < BEFORE_END:
            raise
        return schedule(BEFORE_END)


def _depends_on_progress_alone(schedule: ParamScheduler) -> bool:
    """Whether a schedule is one of those known to give the same factor whenever they are asked."""
    while type(schedule) is WarmupParamScheduler:
        schedule = schedule._scheduler
    return type(schedule) in _KNOWN
