"""Metrics that are combined over ranks, such as losses."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from .history_buffer import HistoryBuffer
from .metric import Metric

__all__ = ["OverRanks", "combine"]

_COMBINE: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "sum": math.fsum, "max": max, "min": min}


def combine(how: str, values: Sequence[float], ranks: int) -> float:
    """Return the value of a metric over all ranks.

    Args:
        how: "mean", "sum", "max" or "min"; or "loss": a mean to which a rank without a value adds 0, like its gradient.
        values: those of the ranks that have one, at least one.
        ranks: number of ranks.
    """
    if any(map(math.isnan, values)):
        return math.nan
    return sum(values) / ranks if how == "loss" else _COMBINE[how](values)


class OverRanks:
    """Gives an :class:`~hookline.hooks.EventStorage` the metrics of several ranks."""

    _metrics: dict[str, Metric]
    _points: list[tuple[int, int, str, float]]

    def __init__(self, start_iter: int) -> None:
        self.over_ranks: dict[str, str] = {}
        """How metrics are combined over ranks, by name; see :func:`combine`. Until :meth:`replace` they hold this
        rank's values."""
        self.shared_until = start_iter - 1
        """The last iteration whose values are combined over ranks."""
        self.nonfinite: dict[str, int] = {}
        """The first iteration at which a metric was NaN or infinite, by name."""

    def _combine_over_ranks(self, name: str, how: str) -> None:
        if how not in _COMBINE:
            raise ValueError(f"metric {name!r}: over_ranks must be one of {', '.join(_COMBINE)}, not {how!r}")
        self.over_ranks[name] = how

    def average_over_ranks(self, names: Iterable[str]) -> None:
        """Replace the values of these losses by their means over ranks, when metrics are written or saved."""
        self.over_ranks |= dict.fromkeys(names, "loss")

    def replace(self, name: str, values: Mapping[int, float]) -> None:
        """Replace the latest values of a metric, given by iteration.

        Raises:
            KeyError: there is no such metric.
        """
        self.history(name).replace(values)
        metric = self._metrics[name]
        metric.seq = self._next_seq()  # writers and medians take the new values
        if not metric.smoothing_hint:
            self._points = [
                (seq, iteration, own, values.get(iteration, value) if own == name else value)
                for seq, iteration, own, value in self._points
            ]
        if self.nonfinite.get(name) in values:
            del self.nonfinite[name]
        self._note_nonfinite(name, list(values.values()), list(values))

    def _note_nonfinite(self, name: str, values: list[float], iters: list[int]) -> None:
        total = sum(values)
        if total - total != 0.0:  # only if a value is NaN or infinite
            bad = (iteration for value, iteration in zip(values, iters, strict=True) if not math.isfinite(value))
            self.nonfinite.setdefault(name, next(bad, iters[-1]))

    def history(self, name: str) -> HistoryBuffer:
        """Return the recent values of a metric."""
        raise NotImplementedError

    def _next_seq(self) -> int:
        raise NotImplementedError
