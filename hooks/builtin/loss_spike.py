"""``LossSpike``: detect sudden jumps of a loss."""

import logging
import math
from collections import deque
from typing import Any, Literal

from ...config import ConfigError
from ..base import HOOK_REGISTRY, HookBase
from ..history_buffer import median

logger = logging.getLogger(__name__)

# For normally distributed values, 1.4826 * MAD is the standard deviation.
_MAD_TO_SIGMA = 1.4826
# The smallest sigma, as a share of the median, for a loss that hardly changes.
_LEAST_SIGMA = 0.01


@HOOK_REGISTRY.register()
class LossSpike(HookBase):
    """Detects spikes of a loss: values above median + ``factor`` * sigma of a window of earlier values.

    Sigma is 1.4826 times the median absolute deviation (MAD), at least 1 % of the median. Outliers hardly affect median
    and MAD (Leys et al., "Detecting outliers: Do not use standard deviation around the mean, use absolute deviation
    around the median", 2013). NaN and infinity are spikes. Spikes join the window too, so a loss that stays high is
    normal after half a window. The limit is computed again when a fifth of the window is new, first when the window is
    half full.

    Checks new values when metrics are written, and before a checkpoint is saved. Reads ``metric``. Writes
    ``loss_spikes``, the number of spikes so far. Saves window, limit and count.

    Args:
        metric: name of the loss in the storage.
        window: number of values in the window.
        factor: number of sigmas above the median.
        action: "warn" logs a warning; "save" also requests a checkpoint; "stop" also stops training.

    Attributes:
        count: number of spikes so far.
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
        self._age = 0  # values since the limit was computed
        self._seen = -1

    def before_train(self) -> None:
        self._seen = self.trainer.start_iter - 1

    def before_save(self, path: str) -> None:
        self._check_new_values()  # the saved state must include all steps before it

    def before_write(self) -> None:
        trainer = self.trainer
        before = self._seen
        self._check_new_values()
        if self._seen > before:
            trainer.storage.put_scalar("loss_spikes", self.count, smoothing_hint=False, cur_iter=self._seen)

    def _check_new_values(self) -> None:
        history = self.trainer.storage.histories().get(self.metric)
        new = history.tail(history.count_since(self._seen)) if history is not None else []
        spikes = []
        for value, iteration in new:
            if value > self._limit or not math.isfinite(value):
                spikes.append((value, iteration, self._limit))
            self._add(value)
            self._seen = iteration
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
        value, iteration, limit = spikes[0]
        more = f" (and {len(spikes) - 1} more since the last check)" if len(spikes) > 1 else ""
        message = f"{self.metric} jumped to {value:.4g} at iteration {iteration}{more}"
        logger.warning("%s; the limit was %.4g; %d spikes so far", message, limit, self.count)
        if command := self.trainer.replay_command(iteration):
            logger.warning("Look at this step: %s", command)
        if self.trainer.ending:
            return
        if self._action == "save":
            self.trainer.request_save()
        elif self._action == "stop":
            self.trainer.request_stop(message)

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._values), "limit": self._limit, "age": self._age, "count": self.count}

    def reset_state(self) -> None:
        self.load_state_dict({"values": [], "limit": math.inf, "age": 0, "count": 0})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._values.clear()
        self._values.extend(state_dict["values"])
        self._limit, self._age, self.count = (state_dict[name] for name in ("limit", "age", "count"))
