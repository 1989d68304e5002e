"""Learning rate schedules, and the hook ``LRScheduler`` that steps them.

A schedule is a :class:`fvcore.common.param_scheduler.ParamScheduler`: called with the progress ``where`` in [0, 1], it
returns a factor of the base learning rate. ``where`` is 1.0 after the last update, so schedules here are defined at
1.0, too.
"""

import inspect
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from fvcore.common.param_scheduler import ParamScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as _TorchScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...config import ConfigError, suggest
from ..base import HOOK_REGISTRY, HookBase
from ..event_storage import has_event_storage

logger = logging.getLogger(__name__)

BEFORE_END = 1 - 2 * ParamScheduler.WHERE_EPSILON
"""The last point at which fvcore's stepwise schedules are defined: they add the epsilon."""


def value_at(schedule: ParamScheduler, where: float) -> float:
    """Return a schedule's value, also at the end, where fvcore's constant and stepwise schedules raise."""
    where = min(where, 1.0)
    try:
        return schedule(where)
    except (IndexError, RuntimeError):
        if where < BEFORE_END:
            raise
        return schedule(BEFORE_END)


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
        if warmup_method not in ("linear", "constant", "exponential"):
            raise ValueError(f'unknown warmup_method {warmup_method!r}; use "linear", "constant" or "exponential"')
        self._start = warmup_factor * scheduler(0.0)
        self._end = scheduler(0.0) if rescale_interval else value_at(scheduler, warmup_length)
        if warmup_method == "exponential" and min(self._start, self._end) <= 0:
            raise ValueError(f"an exponential warm-up rises from {self._start} to {self._end}: both must be positive")
        self._method = warmup_method
        self._scheduler = scheduler
        self._length = warmup_length
        self._rescale = rescale_interval

    def __call__(self, where: float) -> float:
        if where >= self._length:
            if self._rescale and self._length < 1.0:
                where = (where - self._length) / (1.0 - self._length)
            return self._scheduler(where) if where < BEFORE_END else value_at(self._scheduler, where)
        progress = where / self._length
        if self._method == "linear":
            return self._end * progress + self._start * (1 - progress)
        return self._start * (self._end / self._start) ** progress if self._method == "exponential" else self._start


class LRMultiplier(_TorchScheduler):
    """A torch scheduler that multiplies each group's initial learning rate by a schedule's factor.

    Call ``step()`` once after each update. After ``max_iter`` updates the factor stays at its last value. The initial
    rate of a group that is added to the optimizer later is the rate it was added with.

    Args:
        optimizer: the optimizer.
        multiplier: factor as a function of progress.
        max_iter: number of updates in the whole run.
        last_iter: number of the last update; -1 for a new run.
    """

    def __init__(self, optimizer: Optimizer, multiplier: ParamScheduler, max_iter: int, last_iter: int = -1) -> None:
        # detectron2's names. Another value during a run changes the schedule from the next step on.
        self._multiplier = multiplier
        self._max_iter = max_iter
        self._factor = math.nan  # of the rates that were set last; NaN: not known
        self._last_lr: list[float | torch.Tensor] = []
        # The optimizer's load_state_dict() makes a new list. None: its state may be loaded, since the position was.
        self._groups: list[dict[str, Any]] | None = optimizer.param_groups
        super().__init__(optimizer, last_epoch=last_iter)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each group at the current iteration. A subclass may override it."""
        factor = value_at(self._multiplier, self.last_epoch / self._max_iter)
        return [base_lr * factor for base_lr in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Advance by one iteration, or set the rates of iteration ``epoch``, without the checks of torch's ``step``.

        While the schedule's factor does not change, the rates are not set again.
        """
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        where, groups = self.last_epoch / self._max_iter, self.optimizer.param_groups
        factor = self._multiplier(where) if where < BEFORE_END else value_at(self._multiplier, where)
        if factor == self._factor and epoch is None and len(groups) == len(self.base_lrs):
            return
        for group in groups[len(self.base_lrs) :]:  # added since the last step
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"]))
        for group, last in zip(groups, self._last_lr, strict=False):
            if group["lr"] is not last:
                follow_rates(self)
                break
        rates = None if type(self).get_lr is LRMultiplier.get_lr else self.get_lr()
        self._factor, self._last_lr = factor if rates is None else math.nan, []
        for index, (group, base_lr) in enumerate(zip(groups, self.base_lrs, strict=True)):
            rate = base_lr * factor if rates is None else rates[index]
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            self._last_lr.append(rate)

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers; the schedule itself is rebuilt from the config."""
        return {"base_lrs": list(self.base_lrs), "last_epoch": self.last_epoch, "last_lr": list(self._last_lr)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a position. The optimizer's learning rates are part of the optimizer's state and do not change."""
        self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = state_dict["last_epoch"]
        self._factor, self._groups = math.nan, None
        self._last_lr = list(state_dict.get("last_lr") or self.get_lr())  # what follow_rates() compares with


@runtime_checkable
class TimmScheduler(Protocol):
    """The interface of timm's schedulers, whose methods take the number of the epoch and of the update.

    Those of pytorch-accelerated have it too, but their ``step`` takes no number: see :func:`takes_epoch`.
    """

    def step_update(self, num_updates: int) -> None:
        """Set the rates after a number of updates, if the scheduler counts updates."""


def takes_epoch(kind: type) -> bool:
    """Return whether the ``step`` of a scheduler's class must be given a number, as timm's that of the epoch."""
    _, *parameters = inspect.signature(kind.step).parameters.values()  # type: ignore[attr-defined]
    return any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)


_told: WeakSet[_TorchScheduler] = WeakSet()  # schedulers whose rates were set by others, which is logged once


def _step(scheduler: Any) -> None:
    """Have a scheduler follow rates that others have set, and advance by a step."""
    follow_rates(scheduler)
    scheduler.step()
    if isinstance(scheduler, _TorchScheduler):  # the step() of a subclass may change the rates after torch's
        rates = [group["lr"] for group in scheduler.optimizer.param_groups]
        if not any(isinstance(rate, torch.Tensor) for rate in rates):
            scheduler._last_lr = rates


def follow_rates(scheduler: Any, at_start: bool = False) -> None:
    """Scale the base rates of a torch scheduler where the rates are not those that it has set.

    A rate that came with a loaded state of the optimizer alone, without the scheduler's, is replaced by an
    ``LRMultiplier``, as detectron2's does.

    Args:
        scheduler: a scheduler; for other kinds than torch's nothing changes, nor for ``ReduceLROnPlateau``, which reads
            the rates itself, nor for rates that are tensors.
        at_start: before the first step: the rates are base rates, and become those of the first step.
    """
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, _TorchScheduler):
        return
    last_rates = getattr(scheduler, "_last_lr", [])  # a subclass with a step() of its own may set none
    groups, is_loaded = scheduler.optimizer.param_groups, False
    if isinstance(scheduler, LRMultiplier):
        is_loaded = scheduler._groups is not None and scheduler._groups is not groups
        scheduler._groups = groups
    for index, (group, last) in enumerate(zip(groups, last_rates, strict=False)):
        rate = group["lr"]
        if isinstance(rate, torch.Tensor) or math.isclose(rate, last):
            continue
        if is_loaded:
            group["lr"] = last
            logger.warning("The learning rate %g of the optimizer's loaded state is now the schedule's, %g", rate, last)
            continue
        former = float(group.get("initial_lr", last)) if at_start else last

        def scaled(base: Any, rate: float = rate, former: float = former) -> float:
            return rate if base == former or not former else float(base) * (rate / former)

        for part in _parts(scheduler):
            for rates in (getattr(part, "base_lrs", []), getattr(part, "max_lrs", [])):
                rates[index : index + 1] = map(scaled, rates[index : index + 1])
        group |= {key: scaled(group[key]) for key in ("initial_lr", "max_lr", "min_lr") if key in group}
        if at_start and former:
            group["lr"] = rate if last == former else last * (rate / former)
        last_rates[index] = group["lr"] if at_start else rate
        if scheduler not in _told:
            _told.add(scheduler)
            logger.info("A learning rate was set to %g; the schedule is scaled by it (it had set %g)", rate, last)


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler, and those that a ``SequentialLR`` or ``ChainedScheduler`` is made of."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)


@HOOK_REGISTRY.register()
class LRScheduler(HookBase):
    """Steps a learning rate scheduler after each iteration, and puts the rate that was used as ``lr``.

    ``ReduceLROnPlateau`` is stepped with a metric instead, after each evaluation that puts a new value of it. timm's
    schedulers are told the number of the update after each iteration, and the number of the epoch after each epoch;
    pytorch-accelerated's the number of the update, from 0.

    A rate that a script or another hook has set scales the scheduler's base rate from then on; before the first step it
    is the base rate, of which a warm-up still takes its part. timm's schedulers set their own rates again.

    Saves the scheduler's state, and the iteration of the last metric value.

    Args:
        optimizer: the optimizer. Default: the trainer's.
        scheduler: a torch scheduler, a ``ReduceLROnPlateau``, one of timm's, or an fvcore ParamScheduler that returns
            factors of the optimizer's learning rates. Default: the trainer's ``scheduler``.
        name: the metric name of the rate, for several optimizers with a schedule each.
        metric: for ``ReduceLROnPlateau``: the full name of its metric, such as ``"digits_test/loss"``.
        interval: when a torch scheduler is stepped: after each "iteration" or "epoch".
        part: the name of one of the trainer's several optimizers, whose schedule this hook steps.

    Raises:
        ConfigError: before training, if scheduler, optimizer and metric do not fit together.
    """

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        scheduler: "_TorchScheduler | ParamScheduler | None" = None,
        name: str = "lr",
        metric: str | None = None,
        interval: Literal["iteration", "epoch"] = "iteration",
        part: str | None = None,
    ) -> None:
        if interval not in ("iteration", "epoch"):
            raise ConfigError(f'LRScheduler: interval is "iteration" or "epoch", not {interval!r}')
        self._interval = interval
        self._part = part
        if part is not None:
            self.state_key = f"{type(self).__name__}/{part}"
        self._name = name
        self._metric = metric
        self._metric_iter: int | None = None
        self._warned = False
        self._given = optimizer
        self._optimizer: Any = optimizer
        self._scheduler: Any = scheduler
        self._factors = scheduler if isinstance(scheduler, ParamScheduler) else None
        self._max_iter = 0
        self._by_updates = self._takes_epoch = False
        self._each_step = True

    @property
    def scheduler(self) -> Any:
        """The scheduler."""
        return self._scheduler or (self.trainer.scheduler if self._part is None else self.trainer.scheduler[self._part])

    def before_train(self) -> None:
        trainer = self.trainer
        if self._given is None:
            self._optimizer = trainer.optimizer if self._part is None else trainer.optimizer[self._part]
        if isinstance(self.scheduler, ReduceLROnPlateau) != bool(self._metric):
            raise ConfigError(
                f"LRScheduler: metric={self._metric!r} does not fit {type(self.scheduler).__name__}: only "
                'ReduceLROnPlateau takes a metric, and it needs one, such as "digits_test/loss" (in a config '
                "SOLVER.LR_SCHEDULER_METRIC)"
            )
        if self._metric and self._metric not in trainer.storage.latest():  # a new run, not a resumed one
            self._metric_iter = None
        if isinstance(self.scheduler, ParamScheduler):
            self._factors = self.scheduler
        if self._factors is not None:  # each train() has its own length
            follow_rates(self._scheduler)
            for group in self._optimizer.param_groups if trainer.start_iter else ():
                group.setdefault("initial_lr", group["lr"])
            self._scheduler = LRMultiplier(self._optimizer, self._factors, trainer.max_iter, trainer.start_iter - 1)
        follow_rates(self.scheduler, at_start=trainer.start_iter == 0)
        self.set_max_iter(trainer.max_iter)
        for other in trainer.find_hooks(LRScheduler):
            if other is not self and other.scheduler is self.scheduler:
                raise ConfigError(
                    "two LRScheduler hooks step the same scheduler: it would run twice as fast; remove one of them"
                )
        self._best_param_group_id = self.get_best_param_group_id(self._optimizer)
        self._by_updates = not isinstance(self.scheduler, _TorchScheduler) and isinstance(self.scheduler, TimmScheduler)
        self._takes_epoch = self._by_updates and takes_epoch(type(self.scheduler))
        self._each_step = self._metric is None and self._interval == "iteration" and not self._by_updates

    def set_max_iter(self, max_iter: int) -> None:
        """Follow the schedule of a run of another length from the next step on.

        Only an fvcore ParamScheduler and an ``LRMultiplier`` have a length that can change. Others continue unchanged.
        """
        before, self._max_iter = self._max_iter, max_iter
        if isinstance(self.scheduler, LRMultiplier) and self.scheduler._max_iter == before != max_iter:
            self.scheduler._max_iter = max_iter
            self.scheduler.step(self.scheduler.last_epoch)

    @staticmethod
    def get_best_param_group_id(optimizer: Optimizer) -> int:
        """Return the index of the parameter group whose rate is reported.

        This is the largest group, or a group with the most common rate if all groups have one parameter.
        """
        groups = optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if max(sizes) > 1:
            return sizes.index(max(sizes))
        rates = [group["lr"] for group in groups]
        return rates.index(Counter(rates).most_common(1)[0][0])

    def after_step(self) -> None:
        trainer, lr = self.trainer, self._optimizer.param_groups[self._best_param_group_id]["lr"]
        trainer.storage.put_scalar(self._name, lr, smoothing_hint=False)
        if self._each_step:
            scheduler = self._scheduler or (trainer.scheduler if self._part is None else self.scheduler)
            if isinstance(scheduler, LRMultiplier):
                scheduler.step()
            else:
                _step(scheduler)
        elif self._by_updates:
            self.scheduler.step_update(trainer.iter + 1 if self._takes_epoch else trainer.iter)

    def after_epoch(self) -> None:
        if self._takes_epoch:
            self.scheduler.step(self.trainer.epoch + 1)
        elif self._interval == "epoch":
            _step(self.scheduler)

    def after_eval(self, results: Mapping[str, object]) -> None:
        if self._metric is None or not has_event_storage():  # an evaluation without training
            return
        latest = self.trainer.storage.latest()
        if self._metric not in latest:
            if not self._warned:
                logger.warning("LRScheduler: no metric %r so far%s", self._metric, suggest(self._metric, latest))
            self._warned = True
            return
        value, iteration = latest[self._metric]
        if iteration != self._metric_iter:  # otherwise this evaluation did not put the metric
            self._metric_iter = iteration
            self.scheduler.step(value)

    def state_dict(self) -> dict[str, Any]:
        if not hasattr(self.scheduler, "state_dict"):
            return {}
        follow_rates(self.scheduler)
        state = self.scheduler.state_dict()
        return state if self._metric is None else {"scheduler": state, "judged_iter": self._metric_iter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if hasattr(self.scheduler, "load_state_dict"):
            if self._metric is not None:
                self._metric_iter = state_dict["judged_iter"]
                state_dict = state_dict["scheduler"]
            self.scheduler.load_state_dict(state_dict)

    def reset_state(self) -> None:
        self._metric_iter = None
        if isinstance(self.scheduler, LRMultiplier):
            self.scheduler.step(self.trainer.start_iter)
        elif self._factors is None:
            logger.warning(
                "%s continues from its position in the earlier run; register a new LRScheduler to begin again",
                type(self.scheduler).__name__,
            )
