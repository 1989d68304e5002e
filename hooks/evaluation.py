"""Evaluating while training."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ..config import ConfigError, Duration, suggest
from .base import HOOK_REGISTRY, Every, HookBase
from .storage.event_storage import flatten_names, has_event_storage

__all__ = ["EarlyStopping", "EvalHook", "SanityCheck"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class EvalHook(HookBase):
    """Calls an evaluation every ``eval_period``, on request, and after the last iteration.

    What it returns is put into the storage, under names such as ``"digits_test/accuracy"``, as it is: not smoothed.
    Emits ``before_eval``, ``on_eval_end`` and ``after_eval(results)``. A run that failed or was stopped is not
    evaluated at its end.

    Args:
        eval_period: a duration; 0: only at the end.
        eval_function: takes nothing; returns a dict, or nested dicts, of numbers, or None. If several ranks train with
            the same hooks, all ranks use what it returns on the first one.
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
        self._evaluated_at = -1

    def _do_eval(self) -> None:
        trainer = self.trainer
        self._evaluated_at = trainer.iter
        start = time.perf_counter()
        try:
            trainer.emit("before_eval")
            results = self._func()
        finally:
            trainer.emit("on_eval_end")
        if getattr(trainer, "ranks_in_sync", False):  # hooks decide by the results, so all ranks need the same
            results = trainer.comm.broadcast_object(results)
        if results is None:
            results = {}
        if not isinstance(results, Mapping):
            raise TypeError(f"an eval_function must return a dict of numbers, not {results!r}")
        metrics: dict[str, Any] = {}
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
        if self.trainer.iter != self._evaluated_at:  # a period may have ended with the step that it was asked for in
            self._do_eval()


@HOOK_REGISTRY.register()
class SanityCheck(HookBase):
    """Evaluates a few batches of each test set before training, so that a mistake there shows in the first seconds.

    The results are not put into the storage. Emits ``before_sanity_check`` and ``after_sanity_check(results)``.

    Args:
        num_batches: batches of each set.
        evaluate: called as ``evaluate(num_batches)``; by default the trainer's ``evaluate``.
    """

    single = True

    def __init__(self, num_batches: int = 2, evaluate: Callable[[int], Any] | None = None) -> None:
        self._num_batches = num_batches
        self._evaluate = evaluate

    def before_train(self) -> None:
        evaluate = self._evaluate or self.trainer.evaluate
        self.trainer.emit("before_sanity_check")
        results = evaluate(self._num_batches)
        logger.info("Sanity check of %d test batches passed", self._num_batches)
        self.trainer.emit("after_sanity_check", results)


@HOOK_REGISTRY.register()
class EarlyStopping(HookBase):
    """Stops training when a metric has not become better for ``patience`` evaluations in a row.

    Looks at the metric after each evaluation. NaN is not better. Saves the best value and the count.

    A run that was stopped has ended: ``--resume`` trains on only with a larger MAX_ITER, with other arguments for this
    hook, or without it.

    Args:
        metric: its full name, such as ``"digits_test/accuracy"``.
        patience: evaluations without a better value after which training stops.
        mode: whether more ("max") or less ("min") is better.
        min_delta: by how much a value must be better than the best to count.
        reset_on_train: forget the best value and the count when training starts anew.

    Raises:
        ConfigError: after the first evaluation, if it has no such metric; the message lists those there are.
    """

    def __init__(
        self,
        metric: str,
        patience: int = 3,
        mode: Literal["max", "min"] = "max",
        min_delta: float = 0.0,
        reset_on_train: bool = False,
    ) -> None:
        if mode not in ("max", "min"):
            raise ConfigError(f'EarlyStopping: mode must be "max" or "min", not {mode!r}')
        if patience < 1:
            raise ConfigError(f"EarlyStopping: patience must be at least 1, not {patience}")
        self.metric = metric
        self.patience = patience
        self.mode = mode
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta
        self._reset_on_train = reset_on_train
        self.best: float | None = None
        self.count = 0

    def before_train(self) -> None:
        if self._reset_on_train:
            self.reset_state()

    def after_eval(self, results: Mapping[str, Any]) -> None:
        if not has_event_storage():  # an evaluation beside training says nothing of its progress
            return
        metrics = flatten_names(results)
        if self.metric not in metrics:
            raise ConfigError(
                f"EarlyStopping watches {self.metric!r}, which is not among the evaluation's metrics "
                f"({', '.join(metrics) or 'none'}){suggest(self.metric, metrics)}"
            )
        value = float(metrics[self.metric])
        if self.best is None and not math.isnan(value):
            better = True
        else:
            better = self.best is not None and self._sign * (value - self.best) > self._min_delta
        if better:
            self.best, self.count = value, 0
            return
        self.count += 1
        if self.count >= self.patience:
            best = "none" if self.best is None else f"{self.best:.5g}"
            self.trainer.request_stop(
                f"early stopping: {self.metric} has not been better than {best} for {self.count} evaluations",
                everywhere=True,  # all ranks have the same results
            )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.count = state_dict["best"], state_dict["count"]

    def reset_state(self) -> None:
        self.best, self.count = None, 0
