"""A bounded window of one metric's values, with a mean over everything it ever saw."""

import math
from array import array
from collections.abc import Mapping
from functools import reduce
from operator import add
from statistics import fmean, median
from typing import Any

import torch

__all__ = ["HistoryBuffer"]


class HistoryBuffer:
    """The latest values of one scalar and where they were put, with fvcore's interface.

    Two flat arrays, 16 bytes a value: memory stays bounded however long the run is.

    Args:
        max_length: how many values are kept; older ones are dropped, and only count in :meth:`global_avg`.
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

    def update(self, value: float, iteration: int | None = None) -> None:
        """Append ``value``, put at ``iteration`` (by default: the number of values so far)."""
        self._values.append(value)
        self._iters.append(self._count if iteration is None else iteration)
        self._count += 1
        self._total += value
        self._trim()

    def _trim(self) -> None:
        # Cutting a whole window at a time makes the cost of dropping values constant.
        if len(self._values) >= 2 * self._max_length:
            del self._values[: -self._max_length]
            del self._iters[: -self._max_length]

    def extend(self, values: list[float], iters: list[int]) -> None:
        """Append several values at once; see :meth:`update`."""
        self._values.fromlist(values)
        self._iters.fromlist(iters)
        self._count += len(values)
        # One by one, so that the mean does not depend on how many come together; sum() may be more exact than that.
        self._total = reduce(add, values, self._total)
        self._trim()

    def replace(self, values: Mapping[int, float]) -> None:
        """Put other values, by iteration, in the place of the latest ones."""
        first = min(values, default=0)
        for index in range(len(self._iters) - 1, -1, -1):
            iteration = self._iters[index]
            if iteration < first:
                break
            if iteration in values:
                self._total += values[iteration] - self._values[index]
                self._values[index] = values[iteration]

    def latest(self) -> float:
        """The value put last."""
        return self._values[-1]

    def latest_iter(self) -> int:
        """The iteration of the value put last."""
        return self._iters[-1]

    def median(self, window_size: int) -> float:
        """Median of the last ``window_size`` values; NaN if one of them is, however many others are not."""
        window = self._values[-min(window_size, self._max_length) :]
        return math.nan if math.isnan(sum(window)) else median(window)

    def avg(self, window_size: int) -> float:
        """Mean of the last ``window_size`` values."""
        return fmean(self._values[-min(window_size, self._max_length) :])

    def global_avg(self) -> float:
        """Mean of all values ever put, those no longer kept included."""
        return self._total / self._count

    def count_since(self, iteration: int) -> int:
        """How many of the latest values were put after ``iteration``."""
        count = 0
        for it in reversed(self._iters):
            if it <= iteration:
                break
            count += 1
        return count

    def state_dict(self, most: int = 2000) -> dict[str, Any]:
        """The last ``most`` values, and what :meth:`global_avg` needs, as plain data."""
        return {
            # As tensors, which are saved in one piece each.
            "values": torch.tensor(self._values[-most:], dtype=torch.float64),
            "iters": torch.tensor(self._iters[-most:], dtype=torch.int64),
            "count": self._count,
            "total": self._total,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self._values = array("d", state_dict["values"].tolist())
        self._iters = array("q", state_dict["iters"].tolist())
        self._count, self._total = int(state_dict["count"]), float(state_dict["total"])

    def tail(self, count: int) -> list[tuple[float, int]]:
        """The last ``count`` values, oldest first, each with its iteration."""
        start = -min(count, self._max_length)
        return list(zip(self._values[start:], self._iters[start:], strict=True)) if count else []

    def values(self) -> list[tuple[float, int]]:
        """The values kept, oldest first, each with its iteration."""
        return self.tail(self._max_length)
