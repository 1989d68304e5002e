"""Combines metrics over ranks, and compares the times of ranks."""

import time
from collections.abc import Mapping
from typing import Any

from ...hooks.storage.event_storage import EventStorage
from ...hooks.storage.over_ranks import combine
from .. import comm
from .stragglers import RankTimes, Stragglers

__all__ = ["share_metrics"]


def share_metrics(
    storage: EventStorage, iteration: int, stragglers: Stragglers, hook_costs: Mapping[str, tuple[float, int]]
) -> None:
    """Replace this rank's losses since the last call by the means over all ranks, in one exchange; other metrics by
    the sum or maximum, as ``put_scalar(..., over_ranks=...)`` says.

    Every rank must call it at the same step. It also puts ``ranks/time_max``, ``ranks/time_mean``,
    ``ranks/data_time_max`` and ``ranks/data_time_mean`` (seconds per step: the maximum and the mean over ranks), and
    ``ranks/slowest``, the rank that waits longest for its data. It logs a straggler.

    Args:
        storage: its ``over_ranks`` has the names of the losses and other metrics.
        iteration: the last finished iteration.
        stragglers: compares the ranks.
        hook_costs: seconds and calls of each hook.
    """
    mine = {name: {it: value for value, it in _unshared(storage, name)} for name in sorted(storage.over_ranks)}
    names = ("time", "data_time", "forward_time")
    times = {name: _mean(points) for name in names if (points := _unshared(storage, name))}
    costs = {name: seconds for name, (seconds, _) in hook_costs.items()}
    own_times = stragglers.measure(time.perf_counter(), iteration, times, costs)
    parts: list[tuple[dict[str, dict[int, float]], dict[str, float], RankTimes]]
    parts = comm.all_gather((mine, times, own_times))
    for name, own in mine.items():
        there = [part.get(name, {}) for part, *_ in parts]
        how, ranks = storage.over_ranks[name], len(parts)
        if own:
            storage.replace(name, {it: combine(how, [one[it] for one in there if it in one], ranks) for it in own})
    storage.shared_until = iteration
    values: dict[str, Any] = {}
    for name in times:
        seconds = [part.get(name, 0.0) for _, part, _ in parts]
        values |= {f"ranks/{name}_max": max(seconds), f"ranks/{name}_mean": sum(seconds) / len(seconds)}
        if name == "data_time":
            values["ranks/slowest"] = seconds.index(max(seconds))
    stragglers.compare([one for *_, one in parts], iteration)
    if values:
        storage.put_scalars(smoothing_hint=False, cur_iter=iteration, **values)


def _unshared(storage: EventStorage, name: str) -> list[tuple[float, int]]:
    """Return this rank's values of a metric that are not averaged yet, each with its iteration."""
    history = storage.histories().get(name)
    return [] if history is None else history.tail(history.count_since(storage.shared_until))


def _mean(points: list[tuple[float, int]]) -> float:
    return sum(value for value, _ in points) / len(points)
