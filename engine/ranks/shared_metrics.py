"""Combines metrics over ranks."""

from ...hooks.storage.event_storage import EventStorage
from ...hooks.storage.over_ranks import combine
from .. import comm

__all__ = ["share_metrics"]

_OWN_TIMES = ("data_time", "forward_time")
"""What a rank does by itself. In the backward pass it waits for the others."""


def share_metrics(storage: EventStorage, iteration: int) -> None:
    """Replace this rank's losses since the last call by the means over all ranks, in one exchange; other metrics by
    the sum or maximum, as ``put_scalar(..., over_ranks=...)`` says.

    Every rank must call it at the same step. It also puts ``slowest_rank``, the rank that spent the most time on its
    data, and with a ``ForwardTimer`` on its forward passes.

    Args:
        storage: its ``over_ranks`` has the names of the losses and other metrics.
        iteration: the last finished iteration.
    """
    until = storage.shared_until
    mine = {name: {it: value for value, it in _since(until, storage, name)} for name in sorted(storage.over_ranks)}
    seconds = [value for name in _OWN_TIMES for value, _ in _since(until, storage, name)]
    parts: list[tuple[dict[str, dict[int, float]], float]] = comm.all_gather((mine, sum(seconds)))
    for name, own in mine.items():
        there = [part.get(name, {}) for part, _ in parts]
        how, ranks = storage.over_ranks[name], len(parts)
        if own:
            storage.replace(name, {it: combine(how, [one[it] for one in there if it in one], ranks) for it in own})
    storage.shared_until = iteration
    if seconds:
        times = [time for _, time in parts]
        storage.put_scalar("slowest_rank", times.index(max(times)), smoothing_hint=False, cur_iter=iteration)


def _since(iteration: int, storage: EventStorage, name: str) -> list[tuple[float, int]]:
    """Return this rank's values of a metric after an iteration, each with its iteration."""
    history = storage.histories().get(name)
    return [] if history is None else history.tail(history.count_since(iteration))
