"""The metric that a hook watches."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from ...config import ConfigError
from ...config.registry import locate
from ..storage.over_ranks import combine

__all__ = ["Monitor", "names_function"]


class Monitor:
    """A metric by name, or a function of all metrics.

    Args:
        metric: the metric's full name, such as ``"digits_test/accuracy"`` or ``"total_loss"``; or a function that gets
            the latest value of every metric by name, and returns a number, or None to be ignored this time.
            ``"my_module:function"`` names one.

    Raises:
        ConfigError: the function does not exist.
    """

    def __init__(self, metric: str | Callable[[Mapping[str, float]], float | None]) -> None:
        if isinstance(metric, str) and names_function(metric):
            function = locate(metric)
            if not callable(function):
                raise ConfigError(f"{metric} is not a function")
            self.name, self.function = metric, function
        elif callable(metric):
            name = getattr(metric, "__name__", type(metric).__name__)
            self.name, self.function = f"{getattr(metric, '__module__', '')}:{name}", metric
        else:
            self.name, self.function = str(metric), None

    def value(self, trainer: Any, smoothed: bool = False) -> tuple[float, int] | None:
        """Return the latest value in the storage, and its iteration; None if there is none. All ranks call it.

        Args:
            trainer: the trainer.
            smoothed: a smoothed metric's value is the median of its last 20 values.
        """
        storage = trainer.storage
        hints, histories = storage.smoothing_hints(), storage.histories()
        names = sorted(histories) if self.function is not None else [self.name]
        if not set(names) <= set(histories):
            return None
        found = {name: _value(trainer, name, 20 if smoothed and hints[name] else 1) for name in names}
        if self.function is not None:
            try:
                value = self.function(found)
            except KeyError as error:
                error.add_note(f"in {self.name}; the metrics so far: {', '.join(found) or 'none'}")
                raise
            return None if value is None else (float(value), storage.iter)
        return found[self.name], histories[self.name].latest_iter()


def names_function(metric: str) -> bool:
    """Whether a metric is ``"my_module:function"``, not the metric of a test set ``"my_module:data/accuracy"``."""
    return ":" in metric and "/" not in metric


def _value(trainer: Any, name: str, window: int) -> float:
    """The median of the last values, each of them combined over ranks."""
    storage = trainer.storage
    points, how = storage.history(name).values()[-window:], storage.over_ranks.get(name)
    if how is None or not getattr(trainer, "ranks_in_sync", False):
        return float(median(value for value, _ in points))
    ranks = trainer.comm.all_gather({iteration: value for value, iteration in points})
    values = []
    for iteration in sorted(set().union(*ranks))[-window:]:
        there = [one[iteration] for one in ranks if iteration in one]
        values.append(there[0] if iteration <= storage.shared_until else combine(how, there, len(ranks)))
    return float(median(values))
