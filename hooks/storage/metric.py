"""``Metric``: the values of one scalar in the storage."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from .history_buffer import HistoryBuffer

__all__ = ["MeanWindow", "Metric"]


class MeanWindow(int):
    """A window, in iterations, over which smoothed scalars are reported as their mean; over an int, as the median."""


class Metric:
    """The recent values of a scalar, and how writers report them.

    Attributes:
        history: the recent values.
        smoothing_hint: whether writers report a value over a window (True) or the last value.
        seq: the number of the last change. A reader passes the last number it has seen, and gets what is newer.
    """

    __slots__ = ("_smoothed", "history", "seq", "smoothing_hint")

    def __init__(self, smoothing_hint: bool = True, seq: int = 0) -> None:
        self.history = HistoryBuffer()
        self.smoothing_hint = smoothing_hint
        self.seq = seq
        self._smoothed: tuple[tuple[Any, ...], float] = ((), math.nan)

    def reported(self, window_size: int) -> float:
        """Return the value for writers: the last one, or that over the last ``window_size`` iterations."""
        history = self.history
        if not self.smoothing_hint:
            return history.latest()
        key = (self.seq, type(window_size), window_size)
        if self._smoothed[0] != key:  # several writers ask for the same value
            count = max(1, history.count_since(history.latest_iter() - window_size))
            smooth = history.avg if isinstance(window_size, MeanWindow) else history.median
            self._smoothed = (key, smooth(count))
        return self._smoothed[1]

    def points(self, values: list[float], iters: list[int]) -> Iterator[tuple[bool, int, float]]:
        """Return the values that need a row of their own, before ``values`` are added to the history.

        These are the values without a smoothing hint whose next value is not of the next iteration. The last value
        is not among them: it may be followed by one.

        Returns:
            For each: whether it is new, its iteration, and the value.
        """
        if self.smoothing_hint:
            return
        history, first = self.history, iters[0]
        in_series = not len(history) or first - 1 <= history.latest_iter()
        if in_series and iters == list(range(first, first + len(iters))):
            return
        known = history.tail(1)
        for index, ((value, iteration), (_, following)) in enumerate(
            pairwise([*known, *zip(values, iters, strict=True)])
        ):
            if iteration < following - 1:
                yield index >= len(known), iteration, value
