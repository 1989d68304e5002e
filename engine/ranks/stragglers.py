"""Names the rank that slows the others down, and the part of its step that takes the time."""

import logging
import socket
from collections.abc import Mapping, Sequence
from statistics import median_high
from typing import NamedTuple

from .. import comm

__all__ = ["RankTimes", "Stragglers", "find_straggler"]

logger = logging.getLogger(__name__)

# A rank is a straggler if a part of its step takes so much longer than the median of the others': this share of the
# step, and these seconds.
_SHARE, _LEAST = 0.2, 0.01
# Logged when so many comparisons in a row find the same rank and part.
_IN_A_ROW = 2

PARTS = {"data_time": "data loading", "forward_time": "forward pass", "hooks": "hooks"}
"""What a rank does by itself. The backward pass is left out: in it the other ranks wait for the slowest."""


class RankTimes(NamedTuple):
    """Times of a rank since the last comparison.

    Attributes:
        step: mean seconds of a step, from step to step.
        parts: mean seconds a step of each of ``PARTS`` that was measured.
        hook: the hook that took the most time.
        host: name of the machine.
    """

    step: float
    parts: Mapping[str, float]
    hook: str
    host: str


class Straggler(NamedTuple):
    rank: int
    part: str
    seconds: float
    others: float


def find_straggler(ranks: Sequence[RankTimes]) -> Straggler | None:
    """Return the rank that the others wait for longest, if it is a straggler."""
    found = None
    step = max(one.step for one in ranks)
    for part in PARTS:
        seconds = [one.parts.get(part, 0.0) for one in ranks]
        rank = seconds.index(max(seconds))
        others = median_high(seconds[:rank] + seconds[rank + 1 :])
        more = seconds[rank] - others
        if more > max(_SHARE * step, _LEAST) and (found is None or more > found.seconds - found.others):
            found = Straggler(rank, part, seconds[rank], others)
    return found


class Stragglers:
    """Compares the ranks each time that metrics are shared, and logs when a straggler appears, changes or is gone."""

    def __init__(self) -> None:
        self._named: tuple[int, str] | None = None
        self._last: tuple[int, str] | None = None
        self._times = 0
        self._costs: Mapping[str, float] = {}
        self._since: tuple[float, int] | None = None

    @property
    def compared_until(self) -> int | None:
        """The iteration of the last measurement; None before the first one."""
        return None if self._since is None else self._since[1]

    def measure(self, now: float, iteration: int, parts: Mapping[str, float], costs: Mapping[str, float]) -> RankTimes:
        """Return this rank's times since the last call.

        Args:
            now: seconds of a clock.
            iteration: the last finished iteration.
            parts: mean seconds of the parts that metrics have, since the last call.
            costs: seconds that each hook has taken in this run.
        """
        since, self._since = self._since or (now, iteration), (now, iteration)
        steps = max(iteration - since[1], 1)
        spent = {name: seconds - self._costs.get(name, 0.0) for name, seconds in costs.items()}
        self._costs = dict(costs)
        hooks = {"hooks": sum(spent.values()) / steps}
        hook = max(spent, key=lambda name: spent[name], default="")
        known = {name: seconds for name, seconds in parts.items() if name in PARTS}
        return RankTimes((now - since[0]) / steps, {**known, **hooks}, hook, socket.gethostname())

    def compare(self, ranks: Sequence[RankTimes], iteration: int) -> None:
        """Log the straggler among all ranks, on the main process."""
        found = find_straggler(ranks) if ranks[0].step else None
        key = None if found is None else (found.rank, found.part)
        self._times = self._times + 1 if key == self._last else 1
        self._last = key
        if key == self._named or self._times < _IN_A_ROW or not comm.is_main_process():
            return
        self._named = key
        if found is None:
            logger.info("No straggler any more, at iteration %d", iteration)
            return
        one = ranks[found.rank]
        part = f"hooks (mostly {one.hook}) take" if found.part == "hooks" else f"{PARTS[found.part]} takes"
        logger.warning(
            "Rank %d (host %s) is a straggler at iteration %d: its %s %.3g s a step, the others' %.3g s; "
            "a step takes %.3g s",
            found.rank,
            one.host,
            iteration,
            part,
            found.seconds,
            found.others,
            one.step,
        )
