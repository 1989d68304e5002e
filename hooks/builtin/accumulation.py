"""``GradientAccumulationScheduler``: another number of micro-batches from an iteration on."""

from collections.abc import Mapping

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY, HookBase


@HOOK_REGISTRY.register()
class GradientAccumulationScheduler(HookBase):
    """Sets ``trainer.accumulation_steps``, the number of micro-batches that each batch is split into, in each step.

    The batch of an update is not changed, so neither are gradients and the learning rate: what changes is the memory
    that a step needs, for example when layers are unfrozen or samples become larger.

    Args:
        schedule: from a duration in iterations or epochs to the number of micro-batches from then on, such as
            ``{"5ep": 2, "10ep": 4}``. Before the first one it is the trainer's.

    Raises:
        ConfigError: the schedule is empty, or not of this form.
    """

    single = True

    def __init__(self, schedule: Mapping[str | int | Duration, int]) -> None:
        if not isinstance(schedule, Mapping) or not schedule:
            raise ConfigError(f'GradientAccumulationScheduler: schedule must be like {{"5ep": 4}}, not {schedule!r}')
        if not all(type(steps) is int and steps > 0 for steps in schedule.values()):
            raise ConfigError(f"GradientAccumulationScheduler: expected numbers of micro-batches, got {schedule!r}")
        self._schedule = [(Duration.parse_length(start), steps) for start, steps in schedule.items()]

    def before_train(self) -> None:
        trainer = self.trainer
        starts = [(start.iterations(trainer.iters_per_epoch) if start else 0, n) for start, n in self._schedule]
        self._starts = sorted([(-1, trainer.accumulation_steps), *starts])

    def before_step(self) -> None:
        trainer = self.trainer
        trainer.accumulation_steps = [steps for start, steps in self._starts if start <= trainer.iter][-1]

    def after_train(self) -> None:
        trainer = self.trainer
        trainer.accumulation_steps = self._starts[0][1]
