"""``EarlyStopping``: stop when a metric no longer improves."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from ...config import ConfigError, suggest
from ..base import HOOK_REGISTRY, HookBase
from ..common.names import flatten_names
from ..storage.event_storage import has_event_storage

__all__ = ["EarlyStopping"]


@HOOK_REGISTRY.register()
class EarlyStopping(HookBase):
    """Stops training when a metric has not improved for ``patience`` evaluations in a row.

    Reads the metric after each evaluation. NaN is not an improvement. Saves the best value and the count.

    A run that was stopped has ended. ``--resume`` continues it only with a larger MAX_ITER, with other arguments for
    this hook, or without the hook.

    Args:
        metric: the metric's full name, such as ``"digits_test/accuracy"``.
        patience: number of evaluations without improvement after which training stops.
        mode: whether a larger ("max") or a smaller ("min") value is better.
        min_delta: the smallest change that counts as an improvement.
        reset_on_train: forget the best value and the count when training starts.

    Raises:
        ConfigError: after the first evaluation, if it has no such metric.
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
        if not has_event_storage():  # an evaluation without training
            return
        metrics = flatten_names(results)
        if self.metric not in metrics:
            raise ConfigError(
                f"EarlyStopping watches {self.metric!r}, which is not among the evaluation's metrics "
                f"({', '.join(metrics) or 'none'}){suggest(self.metric, metrics)}"
            )
        if self._is_better(float(metrics[self.metric])):
            self.best, self.count = float(metrics[self.metric]), 0
            return
        self.count += 1
        if self.count >= self.patience:
            best = "none" if self.best is None else f"{self.best:.5g}"
            self.trainer.request_stop(
                f"early stopping: {self.metric} has not been better than {best} for {self.count} evaluations",
                everywhere=True,  # all ranks have the same results
            )

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return not math.isnan(value)
        return self._sign * (value - self.best) > self._min_delta

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.count = state_dict["best"], state_dict["count"]

    def reset_state(self) -> None:
        self.best, self.count = None, 0
