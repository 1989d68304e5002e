"""Losses that jump."""

import logging
import math
from collections import deque
from statistics import median
from typing import Any, Literal

from ...config import ConfigError
from ..base import HOOK_REGISTRY, HookBase

__all__ = ["LossSpike"]

logger = logging.getLogger(__name__)

# 1.4826 times the MAD of normally distributed values is their standard deviation.
_MAD_TO_SIGMA = 1.4826
# Deviations below this share of the median are never a spike: a loss that hardly moves has no scale of its own.
_LEAST_SIGMA = 0.01


@HOOK_REGISTRY.register()
class LossSpike(HookBase):
    """Notices values of a loss that are far above those before them: beyond median + ``factor`` * sigma of a window.

    Sigma is 1.4826 times the median absolute deviation from the median (MAD), at least 1 % of the median: neither
    is moved by the outliers that are looked for (Leys et al., "Detecting outliers: Do not use standard deviation
    around the mean, use absolute deviation around the median", 2013). NaN and infinities count too. Values
    join the window whatever they are, so a loss that stays high is the new normal after half a window. The limit is
    renewed each time a fifth of the window is new; nothing is judged before the window is half full.

    Acts when metrics are written, so a spike is seen up to that much later, and before a checkpoint is saved. Reads
    ``metric``, writes ``loss_spikes``: how many there were so far. Saves window, limit and count.

    Args:
        metric: name of the loss in the storage.
        window: how many values the median runs over.
        factor: how many sigmas above the median a value must be.
        action: "warn" logs a warning; "save" asks for a checkpoint too; "stop" ends training in good order.

    Attributes:
        count: spikes so far.
    """

    def __init__(
        self,
        metric: str = "total_loss",
        window: int = 100,
        factor: float = 10.0,
        action: Literal["warn", "save", "stop"] = "warn",
    ) -> None:
        if action not in ("warn", "save", "stop"):
            raise ConfigError(f'LossSpike: action must be "warn", "save" or "stop", not {action!r}')
        if window < 5:
            raise ConfigError(f"LossSpike: window must be at least 5, not {window}")
        self.metric = metric
        self.count = 0
        self._factor = factor
        self._action = action
        self._values: deque[float] = deque(maxlen=window)
        self._limit = math.inf
        self._age = 0  # values since the limit was made
        self._seen = -1
        self._ending = False

    def before_train(self) -> None:
        self._seen = self.trainer.start_iter - 1
        self._ending = False

    def after_train(self) -> None:
        self._ending = True

    def before_save(self, path: str) -> None:
        self._look()  # what is saved knows of every step before it

    def before_write(self) -> None:
        trainer = self.trainer
        before = self._seen
        self._look()
        if self._seen > before:
            trainer.storage.put_scalar("loss_spikes", self.count, smoothing_hint=False, cur_iter=self._seen)

    def _look(self) -> None:
        history = self.trainer.storage.histories().get(self.metric)
        new = history.count_since(self._seen) if history is not None else 0
        if history is None or not new:
            return
        spikes = []
        for value, iteration in history.tail(new):
            if value > self._limit or not math.isfinite(value):
                spikes.append((value, iteration, self._limit))
            self._add(value)
        self._seen = history.latest_iter()
        if spikes:
            self.count += len(spikes)
            self._react(spikes)

    def _add(self, value: float) -> None:
        values, size = self._values, self._values.maxlen or 0
        if math.isfinite(value):
            values.append(value)
        self._age += 1
        if self._age >= size // 5 and 2 * len(values) >= size:
            self._age = 0
            middle = median(values)
            sigma = _MAD_TO_SIGMA * median([abs(one - middle) for one in values])
            self._limit = middle + self._factor * max(sigma, _LEAST_SIGMA * abs(middle))

    def _react(self, spikes: list[tuple[float, int, float]]) -> None:
        value, iteration, limit = max(spikes, key=lambda spike: math.inf if math.isnan(spike[0]) else spike[0])
        more = f" (and {len(spikes) - 1} more since the last writing)" if len(spikes) > 1 else ""
        message = f"{self.metric} jumped to {value:.4g} at iteration {iteration}{more}"
        logger.warning("%s; its limit was %.4g, spikes so far: %d", message, limit, self.count)
        if self._ending:
            return
        if self._action == "save":
            self.trainer.request_save()
        elif self._action == "stop":
            self.trainer.request_stop(message)

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._values), "limit": self._limit, "age": self._age, "count": self.count}

    def reset_state(self) -> None:
        self._values.clear()
        self._limit, self._age, self.count = math.inf, 0, 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._values.clear()
        self._values.extend(state_dict["values"])
        self._limit, self._age, self.count = (state_dict[name] for name in ("limit", "age", "count"))
