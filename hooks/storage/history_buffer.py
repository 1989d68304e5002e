"""``HistoryBuffer``: the recent values of one metric."""

import math
from array import array
from collections.abc import Mapping
from functools import reduce
from operator import add
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

__all__ = ["HistoryBuffer"]


class HistoryBuffer:
    """The recent values of one scalar and their iterations, with fvcore's interface.

    Stored in two flat arrays, 16 bytes per value, so memory stays bounded in a long run.

    Args:
        max_length: number of values kept. Older values count only in :meth:`global_avg`.
    """

    __slots__ = ("_count", "_iters", "_max_length", "_total", "_values")

    def __init__(self, max_length: int = 10_000) -> None:
        self._max_length = max_length
        self._values = array("d")
        self._iters = array("q")
        self._count = 0
        self._total = 0.0

    def __len__(self) -> int:
        return min(len(self._values), self._max_length)

    def update(self, value: Any, iteration: float | None = None) -> None:
        """Append ``value``, a number or a tensor of one, of ``iteration`` (default: the number of values so far)."""
        value = float(value)
        self._iters.append(self._count if iteration is None else int(iteration))
        self._values.append(value)
        self._count += 1
        self._total += value
        self._trim()

    def _trim(self) -> None:
        # Cutting a whole window at a time keeps the average cost constant.
        if len(self._values) >= 2 * self._max_length:
            del self._values[: -self._max_length]
            del self._iters[: -self._max_length]

    def extend(self, values: list[float], iters: list[int]) -> None:
        """Append several values."""
        self._values.fromlist(values)
        self._iters.fromlist(iters)
        self._count += len(values)
        # Not sum(), which rounds differently: the mean must not depend on how many values are appended at once.
        self._total = reduce(add, values, self._total)
        self._trim()

    def replace(self, values: Mapping[int, float]) -> None:
        """Replace the latest values, given by iteration."""
        first = min(values, default=0)
        for index in range(len(self._iters) - 1, -1, -1):
            iteration = self._iters[index]
            if iteration < first:
                break
            if iteration in values:
                self._total += values[iteration] - self._values[index]
                self._values[index] = values[iteration]

    def latest(self) -> float:
        """Return the last value."""
        return self._values[-1]

    def latest_iter(self) -> int:
        """Return the iteration of the last value."""
        return self._iters[-1]

    def median(self, window_size: int) -> float:
        """Return the median of the last ``window_size`` values; NaN if there are none, or any of them is NaN."""
        window = self._values[-min(window_size, self._max_length) :]
        return median(window) if window and not math.isnan(sum(window)) else math.nan

    def avg(self, window_size: int) -> float:
        """Return the mean of the last ``window_size`` values; NaN if there are none."""
        window = self._values[-min(window_size, self._max_length) :]
        return fmean(window) if window else math.nan

    def global_avg(self) -> float:
        """Return the mean of all values ever put, including those no longer kept."""
        return self._total / max(self._count, 1)

    def count_since(self, iteration: int) -> int:
        """Return the number of values after ``iteration``."""
        count = 0
        for it in reversed(self._iters):
            if it <= iteration:
                break
            count += 1
        return count

    def state_dict(self, most: int = 2000) -> dict[str, Any]:
        """Return the last ``most`` values and what :meth:`global_avg` needs, as plain data."""
        return {
            # As tensors, since a checkpoint saves a tensor faster than a list.
            "values": torch.tensor(self._values[-most:], dtype=torch.float64),
            "iters": torch.tensor(self._iters[-most:], dtype=torch.int64),
            "count": self._count,
            "total": self._total,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._values = array("d", state_dict["values"].tolist())
        self._iters = array("q", state_dict["iters"].tolist())
        self._count, self._total = int(state_dict["count"]), float(state_dict["total"])

    def tail(self, count: int) -> list[tuple[float, int]]:
        """Return the last ``count`` values, oldest first, each with its iteration."""
        start = -min(count, self._max_length)
        return list(zip(self._values[start:], self._iters[start:], strict=True)) if count else []

    def values(self) -> list[tuple[float, int]]:
        """Return the kept values, oldest first, each with its iteration."""
        return self.tail(self._max_length)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the iterations and the kept values as arrays, oldest first: ``plt.plot(*history.arrays())``."""
        start = -self._max_length
        return np.array(self._iters[start:]), np.array(self._values[start:])

    # Hooks of detectron2's projects read fvcore's private list.
    _data = property(values)
