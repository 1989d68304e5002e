"""Evaluating while training."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..config import Duration
from .base import HOOK_REGISTRY, Every, HookBase
from .events import flatten_names

__all__ = ["EvalHook"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class EvalHook(HookBase):
    """Calls an evaluation every ``eval_period``, on request, and after the last iteration.

    What it returns is put into the storage, under names such as ``"digits_test/accuracy"``, as it is: not smoothed.
    Emits ``before_eval`` and ``after_eval(results)``. A run that failed or was stopped is not evaluated at its end.

    Args:
        eval_period: a duration; 0: only at the end.
        eval_function: takes nothing; returns a dict, or nested dicts, of numbers. None is as good as an empty one.
        eval_after_train: whether to evaluate after the last iteration.
    """

    def __init__(
        self,
        eval_period: "Duration | int | str",
        eval_function: Callable[[], Mapping[str, Any] | None],
        eval_after_train: bool = True,
    ) -> None:
        self._period = eval_period
        self._every = Every(eval_period)
        self._func = eval_function
        self._eval_after_train = eval_after_train

    def before_train(self) -> None:
        self._every.start()

    def _do_eval(self) -> None:
        trainer = self.trainer
        start = time.perf_counter()
        trainer.emit("before_eval")
        results = self._func()
        if results is None:
            results = {}
        if not isinstance(results, Mapping):
            raise TypeError(f"an eval_function must return a dict of numbers, not {results!r}")
        metrics = {}
        for name, value in flatten_names(results).items():
            try:
                metrics[name] = float(value)
            except (TypeError, ValueError):
                raise TypeError(f"an eval_function must return numbers; {name!r} is {value!r}") from None
        trainer.storage.put_scalars(**metrics, smoothing_hint=False)
        if metrics:
            line = "  ".join(f"{name}: {value:.5g}" for name, value in metrics.items())
            logger.info("Evaluation:  %s  (%.2g s)", line, time.perf_counter() - start)
        trainer.emit("after_eval", results)

    def after_step(self) -> None:
        trainer = self.trainer
        # The end of the last step is left to after_train, so that its metrics stand at max_iter.
        if self._every(trainer) and not (self._eval_after_train and trainer.iter + 1 == trainer.max_iter):
            self._do_eval()

    def after_train(self) -> None:
        if self._eval_after_train and self.trainer.completed:
            self._do_eval()

    def on_eval(self) -> None:
        self._do_eval()
