"""How long things take."""

import datetime
import logging
import time

from .base import HOOK_REGISTRY, HookBase

__all__ = ["IterationTimer"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class IterationTimer(HookBase):
    """Puts the time of each step, in seconds, as ``time``; reports the whole run's speed at the end.

    A step is what lies between ``before_step`` and ``after_step``, so register this hook first: the time other hooks
    take in ``after_step`` is not the step's, and is reported apart from it.

    Args:
        warmup_iter: steps at the start (caches fill, kernels are chosen) that are not counted.
    """

    def __init__(self, warmup_iter: int = 3) -> None:
        self._warmup_iter = warmup_iter

    def before_train(self) -> None:
        self._start = self._step_start = time.perf_counter()
        self._counted_from = self._start
        self._steps_time = 0.0
        self._steps = 0

    def before_step(self) -> None:
        self._step_start = time.perf_counter()

    def after_step(self) -> None:
        now = time.perf_counter()
        trainer = self.trainer
        if trainer.iter - trainer.start_iter < self._warmup_iter:
            self._counted_from = now
            return
        seconds = now - self._step_start
        self._steps += 1
        self._steps_time += seconds
        trainer.storage.put_scalar("time", seconds)

    def after_train(self) -> None:
        if not self._steps:
            return
        total = time.perf_counter() - self._counted_from
        per_second = self._steps / self._steps_time if self._steps_time > 0 else float("inf")
        logger.info(
            "Overall training speed: %d iterations in %s (%.4g s / it, %.4g it / s)",
            self._steps,
            _duration(self._steps_time),
            self._steps_time / self._steps,
            per_second,
        )
        logger.info("Total training time: %s (%s on hooks)", _duration(total), _duration(max(total - self._steps_time, 0.0)))


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))
