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
    storage: EventStorage,
    iteration: int,
    stragglers: Stragglers,
    hook_costs: Mapping[str, tuple[float, int]],
    compare: bool = True,
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
        compare: whether to compare the times of ranks, since the last comparison.
    """
    until = storage.shared_until
    mine = {name: {it: value for value, it in _since(until, storage, name)} for name in sorted(storage.over_ranks)}
    until = until if stragglers.compared_until is None else stragglers.compared_until
    names = ("time", "data_time", "forward_time") if compare else ()
    times = {name: _mean(points) for name in names if (points := _since(until, storage, name))}
    costs = {name: seconds for name, (seconds, _) in hook_costs.items()}
    own_times = stragglers.measure(time.perf_counter(), iteration, times, costs) if compare else None
    parts: list[tuple[dict[str, dict[int, float]], dict[str, float], RankTimes | None]]
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
    if compare:
        stragglers.compare([one for *_, one in parts if one is not None], iteration)
    if values:
        storage.put_scalars(smoothing_hint=False, cur_iter=iteration, **values)


def _since(iteration: int, storage: EventStorage, name: str) -> list[tuple[float, int]]:
    """Return this rank's values of a metric after an iteration, each with its iteration."""
    history = storage.histories().get(name)
    return [] if history is None else history.tail(history.count_since(iteration))


def _mean(points: list[tuple[float, int]]) -> float:
    return sum(value for value, _ in points) / len(points)
