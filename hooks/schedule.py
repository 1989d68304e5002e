"""What changes in the course of training."""

import logging
from collections import Counter
from typing import Any

import torch
from fvcore.common.param_scheduler import ParamScheduler
from torch.optim.lr_scheduler import LRScheduler as _TorchScheduler

from ..config import ConfigError
from .base import HOOK_REGISTRY, HookBase

__all__ = ["LRScheduler"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class LRScheduler(HookBase):
    """Steps a learning-rate scheduler once each iteration, and puts the rate that was used as ``lr``.

    Saves the scheduler's state.

    Args:
        optimizer: by default the trainer's.
        scheduler: a torch scheduler that counts iterations, or an fvcore ParamScheduler giving multiples of the
            optimizer's learning rates; by default the trainer's ``scheduler``.
        name: of the metric, where several optimizers have a schedule each.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: "_TorchScheduler | ParamScheduler | None" = None,
        name: str = "lr",
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        self._scheduler = scheduler

    def before_train(self) -> None:
        self._optimizer = self._optimizer or self.trainer.optimizer
        if isinstance(self.scheduler, ParamScheduler):
            self._scheduler = self._multiply(self.scheduler)
        for other in getattr(self.trainer, "find_hooks", lambda cls: [])(LRScheduler):
            if other is not self and other.scheduler is self.scheduler:
                raise ConfigError(
                    "two LRScheduler hooks step the same scheduler: it would run twice as fast; leave one out"
                )
        self._group = self.get_best_param_group_id(self._optimizer)

    def _multiply(self, multiplier: ParamScheduler) -> _TorchScheduler:
        """A torch scheduler that applies ``multiplier`` from the trainer's present iteration on."""
        max_iter, start_iter = self.trainer.max_iter, self.trainer.start_iter
        if start_iter:
            for group in self._optimizer.param_groups:  # type: ignore[union-attr]
                group.setdefault("initial_lr", group["lr"])
        return torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,  # type: ignore[arg-type]
            lambda it: _value_at(multiplier, it / max_iter),
            last_epoch=start_iter - 1,
        )

    @staticmethod
    def get_best_param_group_id(optimizer: torch.optim.Optimizer) -> int:
        """The parameter group whose rate stands for all: the largest of those with the most common base rate.

        With separate groups for biases or norms, the rate most groups share is the one people mean by "the" rate.
        """
        groups = optimizer.param_groups
        largest = max(len(group["params"]) for group in groups)
        if largest > 1:
            return next(i for i, group in enumerate(groups) if len(group["params"]) == largest)
        # One parameter a group: take a group that has the most common rate.
        lr = Counter(group["lr"] for group in groups).most_common(1)[0][0]
        return next(i for i, group in enumerate(groups) if group["lr"] == lr)

    def after_step(self) -> None:
        lr = self._optimizer.param_groups[self._group]["lr"]  # type: ignore[union-attr]
        trainer = self.trainer
        trainer.storage.put_scalar(self._name, lr, smoothing_hint=False)
        (self._scheduler or trainer.scheduler).step()

    @property
    def scheduler(self) -> Any:
        """The scheduler that is stepped."""
        return self._scheduler or self.trainer.scheduler

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict() if isinstance(self.scheduler, _TorchScheduler) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if isinstance(self.scheduler, _TorchScheduler):
            logger.debug("Loading scheduler from state_dict ...")
            self.scheduler.load_state_dict(state_dict)


def _value_at(multiplier: ParamScheduler, where: float) -> float:
    """A schedule's value. It is defined on [0, 1), and some fail at the end, which the step after the last asks for."""
    try:
        return multiplier(min(where, 1.0))
    except (IndexError, RuntimeError):
        if where < 1.0 - 1e-5:
            raise
        return multiplier(1.0 - 1e-5)
