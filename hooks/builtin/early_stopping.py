"""``EarlyStopping``: stop when a metric no longer improves."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ...config import ConfigError, suggest
from ...config.components import mode_of_result
from ...config.values import mode_of
from ..base import HOOK_REGISTRY, HookBase
from ..evaluation import EvalHook, Monitor, flatten_names
from ..event_storage import has_event_storage

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class EarlyStopping(HookBase):
    """Stops training when a metric has not improved for ``patience`` evaluations in a row.

    Reads the metric after each evaluation. A metric of training, such as ``"total_loss"``, is read after each epoch, a
    smoothed one as its median over the last 20 iterations. NaN is not an improvement. Saves best value and count. A
    metric that does not exist is a warning, after the first epoch if nothing is evaluated, or at the end.

    A run that was stopped stops again at ``--resume`` and in a second ``train()``, before its first step, unless
    ``patience`` is larger or this hook is gone.

    Args:
        metric: the metric's full name, such as ``"digits_test/accuracy"``, or a function of all metrics; see
            :class:`~hookline.hooks.evaluation.Monitor`. Default: that of CHECKPOINT.BEST.
        patience: number of evaluations, or epochs, without improvement after which training stops.
        mode: whether a larger ("max") or a smaller ("min") value is better. "auto": the MODE of CHECKPOINT.BEST if that
            has the same metric, otherwise as the metric's name says.
        min_delta: the smallest change that counts as an improvement.
        reset_on_train: forget the best value and the count when training starts.

    Raises:
        ConfigError: neither this hook nor CHECKPOINT.BEST has a metric; or there is no such metric after the first
            evaluation.
    """

    def __init__(
        self,
        metric: str | Callable[[Mapping[str, float]], float | None] = "",
        patience: int = 3,
        mode: Literal["max", "min", "auto"] | None = "auto",
        min_delta: float = 0.0,
        reset_on_train: bool = False,
    ) -> None:
        if mode not in ("max", "min", "auto", None):
            raise ConfigError(f'EarlyStopping: mode must be "max", "min" or "auto", not {mode!r}')
        if patience < 1:
            raise ConfigError(f"EarlyStopping: patience must be at least 1, not {patience}")
        self._monitor = Monitor(metric)
        self.metric = self._monitor.name
        self.patience = patience
        self.given_mode = mode or "auto"
        self.mode = mode_of(self.metric, self.given_mode)
        self._min_delta = min_delta
        self._reset_on_train = reset_on_train
        self.best: float | None = None
        self.count = 0
        self._warned = False

    def on_registered(self) -> None:
        cfg = getattr(self.trainer, "cfg", None)
        best: Any = getattr(getattr(cfg, "CHECKPOINT", None), "BEST", None)
        if not self.metric:
            if best is None or not best.METRIC:
                raise ConfigError(
                    "EarlyStopping has no metric: give it one, or set CHECKPOINT.BEST.METRIC (monitor=...)"
                )
            self._monitor = Monitor(best.METRIC)
            self.metric = self._monitor.name
        of_run = best is not None and self.metric == best.METRIC and self.given_mode == "auto"
        self.mode = mode_of_result(cfg, self.metric, best.MODE if of_run else self.given_mode)

    def before_train(self) -> None:
        if self._reset_on_train:
            self.reset_state()
        if self._is_exhausted:
            self._stop()

    def after_eval(self, results: Mapping[str, object]) -> None:
        if not has_event_storage():  # an evaluation without training
            return
        metrics = flatten_names(results)
        if self._monitor.function is not None:
            found = self._monitor.value(self.trainer)
            if found is not None:
                self._judge(found[0])
        elif self.metric in metrics:
            if self.trainer.completed and self.best is None:
                logger.warning(
                    "EarlyStopping could not stop the run, which was evaluated only at its end: set TEST.EVAL_PERIOD "
                    "(Trainer: eval_period=...)"
                )
            self._judge(float(metrics[self.metric]))
        elif self.trainer.iter == self.trainer.start_iter or self.trainer.completed:
            return  # a metric of training may come yet; at the end after_train() warns
        elif not (self._is_of_training() and self.trainer.iters_per_epoch):  # else after_epoch() reads it
            raise ConfigError(
                f"EarlyStopping watches {self.metric!r}, which is not among the evaluation's metrics "
                f"({', '.join(metrics) or 'none'}){suggest(self.metric, metrics)}. A "
                "metric of training is read after each epoch, for which the loader needs a length"
            )

    def _is_of_training(self) -> bool:
        storage = self.trainer.storage
        return self.metric not in storage.evaluated and self.metric in storage.histories()

    def after_epoch(self) -> None:
        if self._is_of_training() and (found := self._monitor.value(self.trainer, smoothed=True)) is not None:
            self._judge(found[0])
        elif not self.trainer.find_hooks(EvalHook):
            self._warn_if_missing()

    def after_train(self) -> None:
        if self.trainer.completed:
            self._warn_if_missing()

    def _warn_if_missing(self) -> None:
        if self.best is None and not self.count and not self._warned and self.trainer.iter > self.trainer.start_iter:
            self._warned = True
            hint = suggest(self.metric, self.trainer.storage.latest())
            logger.warning(
                "EarlyStopping has found no value of %r so far, and cannot stop the run%s", self.metric, hint
            )

    @property
    def _is_exhausted(self) -> bool:
        return self.count >= self.patience

    def _judge(self, value: float) -> None:
        if self._is_exhausted:
            return
        if self._is_better(value):
            self.best, self.count = value, 0
            return
        self.count += 1
        if self._is_exhausted:
            self._stop()

    def _stop(self) -> None:
        best = "none" if self.best is None else f"{self.best:.5g}"
        times = "epochs" if self._is_of_training() else "evaluations"
        # All ranks have the same results.
        self.trainer.stop(f"early stopping: {self.metric} has not been better than {best} for {self.count} {times}")

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return not math.isnan(value)
        return (value - self.best if self.mode == "max" else self.best - value) > self._min_delta

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict["best"]
        self.best, self.count = None if best is None else float(best), state_dict["count"]

    def reset_state(self) -> None:
        self.best, self.count = None, 0
