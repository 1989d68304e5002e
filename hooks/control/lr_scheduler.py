"""``LRScheduler``: step a learning rate scheduler."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from fvcore.common.param_scheduler import ParamScheduler
from torch.optim.lr_scheduler import LRScheduler as _TorchScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...config import ConfigError, suggest
from ..base import HOOK_REGISTRY, HookBase
from ..common.models import TimmScheduler, takes_epoch, value_at
from ..storage.event_storage import has_event_storage

__all__ = ["LRScheduler"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class LRScheduler(HookBase):
    """Steps a learning rate scheduler after each iteration, and puts the rate that was used as ``lr``.

    ``ReduceLROnPlateau`` is stepped with a metric instead, after each evaluation that puts a new value of it. timm's
    schedulers are told the number of the update after each iteration, and the number of the epoch after each epoch;
    pytorch-accelerated's the number of the update, from 0.

    Saves the scheduler's state, and the iteration of the last metric value.

    Args:
        optimizer: the optimizer. Default: the trainer's.
        scheduler: a torch scheduler, a ``ReduceLROnPlateau``, one of timm's, or an fvcore ParamScheduler that returns
            factors of the optimizer's learning rates. Default: the trainer's ``scheduler``.
        name: the metric name of the rate, for several optimizers with a schedule each.
        metric: for ``ReduceLROnPlateau``: the full name of its metric, such as ``"digits_test/loss"``.
        interval: when a torch scheduler is stepped: after each "iteration", "epoch" or "evaluation".
        part: the name of one of the trainer's several optimizers, whose schedule this hook steps.

    Raises:
        ConfigError: before training, if scheduler, optimizer and metric do not fit together.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: "_TorchScheduler | ParamScheduler | None" = None,
        name: str = "lr",
        metric: str | None = None,
        interval: Literal["iteration", "epoch", "evaluation"] = "iteration",
        part: str | None = None,
    ) -> None:
        if interval not in ("iteration", "epoch", "evaluation"):
            raise ConfigError(f'LRScheduler: interval is "iteration", "epoch" or "evaluation", not {interval!r}')
        self._interval = interval
        self._part = part
        if part is not None:
            self.state_key = f"{type(self).__name__}/{part}"
        self._name = name
        self._metric = metric
        self._metric_iter: int | None = None
        self._warned = False
        self._given = optimizer
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._multiplier = scheduler if isinstance(scheduler, ParamScheduler) else None
        self._length: int | None = None
        self._by_updates = self._takes_epoch = False
        self._each_step = True

    def before_train(self) -> None:
        optimizer = self._find_optimizer()
        self._check_metric()
        if isinstance(self.scheduler, ParamScheduler):
            self._multiplier = self.scheduler
            self._scheduler = self._torch_scheduler(self._multiplier)
        self.set_max_iter(self.trainer.max_iter)
        for other in self.trainer.find_hooks(LRScheduler):
            if other is not self and other.scheduler is self.scheduler:
                raise ConfigError(
                    "two LRScheduler hooks step the same scheduler: it would run twice as fast; remove one of them"
                )
        self._best_param_group_id = self.get_best_param_group_id(optimizer)
        self._by_updates = not isinstance(self.scheduler, _TorchScheduler) and isinstance(self.scheduler, TimmScheduler)
        self._takes_epoch = self._by_updates and takes_epoch(type(self.scheduler))
        self._each_step = self._metric is None and self._interval == "iteration" and not self._by_updates

    def _find_optimizer(self) -> torch.optim.Optimizer:
        if self._given is not None:
            return self._given
        optimizer: Any = self.trainer.optimizer
        self._optimizer = found = optimizer if self._part is None else optimizer[self._part]
        return found

    def _check_metric(self) -> None:
        scheduler = self.scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            if not self._metric:
                raise ConfigError(
                    "LRScheduler: ReduceLROnPlateau needs a metric; pass its name, as in "
                    'LRScheduler(metric="digits_test/loss"); in a config, SOLVER.LR_SCHEDULER_METRIC'
                )
            if self._metric not in self.trainer.storage.latest():  # a new run, not a resumed one
                self._metric_iter = None
        elif self._metric:
            raise ConfigError(
                f"LRScheduler: metric={self._metric!r} is for ReduceLROnPlateau; {type(scheduler).__name__} counts "
                "iterations, so remove the argument"
            )

    def _torch_scheduler(self, multiplier: ParamScheduler) -> _TorchScheduler:
        """Return a torch scheduler that applies ``multiplier`` from the run's first iteration on."""
        optimizer = self._optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"LRScheduler: a {type(multiplier).__name__} sets the rates of one torch optimizer, not of "
                f"{type(optimizer).__name__}; for several optimizers register one LRScheduler each, as "
                'LRScheduler(optimizer, scheduler, name="lr_head")'
            )
        trainer, start_iter = self.trainer, self.trainer.start_iter
        if start_iter:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda it: value_at(multiplier, it / trainer.max_iter),
            last_epoch=start_iter - 1,
        )

    def set_max_iter(self, max_iter: int) -> None:
        """Follow the schedule of a run of another length from the next step on.

        Only an fvcore ParamScheduler and an ``LRMultiplier`` have a length that can change. Others continue unchanged.
        """
        before, self._length = self._length, max_iter
        scheduler = self.scheduler
        if before in (None, max_iter):
            return
        if self._multiplier is None:
            if getattr(scheduler, "_max_iter", None) != before:
                return
            scheduler._max_iter = max_iter
        self._set_rates()

    def _set_rates(self) -> None:
        """Set the optimizer's rates to those of the scheduler's current iteration."""
        scheduler: Any = self.scheduler
        if self._multiplier is None:
            rates = scheduler.get_lr()
        else:  # torch's get_lr() warns outside of step()
            factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
            rates = [base * factor for base in scheduler.base_lrs]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):  # type: ignore[union-attr]
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @staticmethod
    def get_best_param_group_id(optimizer: torch.optim.Optimizer) -> int:
        """Return the index of the parameter group whose rate is reported.

        This is the largest group, or a group with the most common rate if all groups have one parameter.
        """
        groups = optimizer.param_groups
        largest = max(len(group["params"]) for group in groups)
        if largest > 1:
            return next(i for i, group in enumerate(groups) if len(group["params"]) == largest)
        lr = Counter(group["lr"] for group in groups).most_common(1)[0][0]
        return next(i for i, group in enumerate(groups) if group["lr"] == lr)

    def after_step(self) -> None:
        lr = self._optimizer.param_groups[self._best_param_group_id]["lr"]  # type: ignore[union-attr]
        trainer = self.trainer
        trainer.storage.put_scalar(self._name, lr, smoothing_hint=False)
        if self._each_step:
            (self._scheduler or (trainer.scheduler if self._part is None else self.scheduler)).step()
        elif self._by_updates:
            self.scheduler.step_update(trainer.iter + 1 if self._takes_epoch else trainer.iter)

    def after_epoch(self) -> None:
        if self._takes_epoch:
            self.scheduler.step(self.trainer.epoch + 1)
        elif self._interval == "epoch":
            self.scheduler.step()

    def after_eval(self, results: Mapping[str, Any]) -> None:
        if not has_event_storage():  # an evaluation without training
            return
        if self._metric is None:
            if self._interval == "evaluation" and self.trainer.iter < self.trainer.max_iter:
                self.scheduler.step()
            return
        latest = self.trainer.storage.latest()
        if self._metric not in latest:
            self._warn_of_missing_metric(latest)
            return
        value, iteration = latest[self._metric]
        if iteration == self._metric_iter:  # this evaluation did not put the metric
            return
        self._metric_iter = iteration
        before = [float(group["lr"]) for group in self._optimizer.param_groups]  # type: ignore[union-attr]
        self.scheduler.step(value)
        after = [float(group["lr"]) for group in self._optimizer.param_groups]  # type: ignore[union-attr]
        if after != before:
            logger.info(
                "%s is %.5g and has not improved: the learning rate is now %g instead of %g",
                self._metric,
                value,
                after[self._best_param_group_id],
                before[self._best_param_group_id],
            )

    def _warn_of_missing_metric(self, latest: Mapping[str, Any]) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "LRScheduler needs %r, which is not among the metrics put so far (%s)%s",
                self._metric,
                ", ".join(latest) or "none",
                suggest(str(self._metric), latest),
            )

    @property
    def scheduler(self) -> Any:
        """The scheduler."""
        return self._scheduler or (self.trainer.scheduler if self._part is None else self.trainer.scheduler[self._part])

    def state_dict(self) -> dict[str, Any]:
        if not hasattr(self.scheduler, "state_dict"):
            return {}
        state = self.scheduler.state_dict()
        return state if self._metric is None else {"scheduler": state, "judged_iter": self._metric_iter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if hasattr(self.scheduler, "load_state_dict"):
            logger.debug("Loading scheduler from state_dict ...")
            if self._metric is not None:
                self._metric_iter = state_dict["judged_iter"]
                state_dict = state_dict["scheduler"]
            self.scheduler.load_state_dict(state_dict)

    def reset_state(self) -> None:
        self._metric_iter = None
        if self._multiplier is not None:
            self._scheduler = self._multiplier  # before_train() creates a new torch scheduler from it
        elif hasattr(self.scheduler, "_max_iter"):
            self.scheduler.last_epoch = self.trainer.start_iter
            self._find_optimizer()
            self._set_rates()
        else:
            logger.warning(
                "%s continues from its position in the earlier run: it cannot be set to iteration %d. Register a new "
                "LRScheduler to train from there",
                type(self.scheduler).__name__,
                self.trainer.start_iter,
            )
