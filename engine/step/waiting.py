"""What a trainer does with steps that wait: who needs results computes them first."""

from collections.abc import Iterable, Sequence
from typing import Any

from ...hooks.base import HookBase
from ..train_loop import TrainerBase
from .queued_steps import QueuedSteps

__all__ = ["WaitingSteps"]


class WaitingSteps(TrainerBase):
    """A trainer whose steps may wait (:class:`~hookline.engine.step.queued_steps.QueuedSteps`)."""

    _whole_step: Any = None

    @property
    def waiting_steps(self) -> Sequence[Any]:  # type: ignore[override]
        return self._whole_step.waiting if isinstance(self._whole_step, QueuedSteps) else ()

    def finish_steps(self) -> None:
        if isinstance(self._whole_step, QueuedSteps):
            self._whole_step.finish(self)

    def _end_of_epoch(self) -> None:
        if isinstance(self._whole_step, QueuedSteps):
            self._whole_step.finish(self, "the epoch ended")

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        self.finish_steps()
        super().register_hooks(hooks)

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        self.finish_steps()
        super().emit(event, *args, **kwargs)

    def before_epoch(self) -> None:
        self._end_of_epoch()
        super().before_epoch()

    def after_epoch(self) -> None:
        self._end_of_epoch()
        super().after_epoch()

    def _change_hooks(self) -> None:
        self.finish_steps()
        super()._change_hooks()

    def _fail(self, error: BaseException) -> BaseException:
        """Record an error, after the steps that wait: one of them may have failed before."""
        queue = self._whole_step
        if self._error is None and isinstance(queue, QueuedSteps):
            if not isinstance(error, Exception):
                queue.discard(self)
            try:
                queue.finish(self)
            except BaseException as earlier:
                first = self._fail(earlier)
                super()._fail(error)
                return first
        return super()._fail(error)
