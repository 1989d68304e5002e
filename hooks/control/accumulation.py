"""``GradientAccumulationScheduler``: another number of micro-batches from an iteration on."""

import logging
from collections.abc import Mapping
from typing import Any

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY, HookBase

__all__ = ["GradientAccumulationScheduler"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class GradientAccumulationScheduler(HookBase):
    """Changes the number of micro-batches that each batch is split into (``trainer.accumulation_steps``).

    The batch of an update is not changed, so neither are gradients and the learning rate: what changes is the memory
    that a step needs, for example when layers are unfrozen or samples become larger. The iteration determines the
    number, so nothing is saved. Acts in ``before_train``, and in ``before_step`` when the number changes.

    Args:
        schedule: from a duration in iterations or epochs to the number of micro-batches from then on, such as
            ``{"5ep": 2, "10ep": 4}``. Before the first one it is the trainer's.

    Raises:
        ConfigError: the schedule is empty, or not of this form.
    """

    single = True

    def __init__(self, schedule: Mapping[Any, int]) -> None:
        if not isinstance(schedule, Mapping) or not schedule:
            raise ConfigError(
                f'GradientAccumulationScheduler: schedule is a mapping such as {{"5ep": 4}}, not {schedule!r}'
            )
        for steps in schedule.values():
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                raise ConfigError(f"GradientAccumulationScheduler: expected a number of micro-batches, got {steps!r}")
        self._schedule = [(Duration.parse_length(start), steps) for start, steps in schedule.items()]
        self._own: int | None = None  # the trainer's number
        self._next: int | None = None

    def before_train(self) -> None:
        trainer: Any = self.trainer
        if not hasattr(trainer, "accumulation_steps"):
            raise ConfigError(f"GradientAccumulationScheduler: {type(trainer).__name__} has no accumulation_steps")
        self._own = trainer.accumulation_steps
        try:
            starts = [(start.iterations(trainer.iters_per_epoch) if start else 0, n) for start, n in self._schedule]
        except ConfigError as error:
            raise ConfigError(f"GradientAccumulationScheduler: {error}") from None
        self._starts = sorted(starts)
        self._apply(trainer.start_iter)

    def before_step(self) -> None:
        if self._next is not None and self.trainer.iter >= self._next:
            self._apply(self.trainer.iter)

    def after_train(self) -> None:
        trainer: Any = self.trainer
        if self._own is not None:
            trainer.accumulation_steps, self._own = self._own, None

    def _apply(self, iteration: int) -> None:
        trainer: Any = self.trainer
        past = [steps for start, steps in self._starts if start <= iteration]
        self._next = min((start for start, _ in self._starts if start > iteration), default=None)
        if past and trainer.accumulation_steps != past[-1]:
            trainer.accumulation_steps = past[-1]
            logger.info("From iteration %d on, each batch is split into %d micro-batches", iteration, past[-1])
