"""Times of runs that take turns, and the table of their ratios.

A benchmark is a module with ``GROUPS``: for each group the steps in a round, and a function that returns the group's
runs for an empty folder. The first run does by hand what the others do with hookline.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from hookline.engine import comm

Run = Callable[[int], float]
"""Runs a number of steps and returns the seconds."""
Groups = dict[str, tuple[int, Callable[[str], dict[str, Run]]]]
Times = dict[str, list[float]]
"""Seconds per step of each row, in each round."""


def now() -> float:
    """Return the time in seconds, after the work that was given to a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def repeated(act: Callable[[], object]) -> Run:
    """Return a run whose step is a call of ``act``."""

    def run(steps: int) -> float:
        start = now()
        for _ in range(steps):
            act()
        return now() - start

    return run


def in_turns(runs: dict[str, Run], steps: int, rounds: int) -> Times:
    """Run all rows in each round, so that a slow moment of the machine affects all.

    Every other round has the reverse order, since a run can slow down the next one. A first round is not counted. Of
    several ranks, the slowest counts.
    """
    times: Times = {row: [] for row in runs}
    for number in range(rounds + 1):
        for row in runs if number % 2 else reversed(runs):
            gc.collect()
            seconds = max(comm.all_gather(runs[row](steps))) / steps
            if number:
                times[row].append(seconds)
    return times


def table(times: Times) -> Iterator[str]:
    """Yield the lines of a table: the time of a step, and its ratio to that of the first row in the same round.

    Both are medians.
    """
    base = next(iter(times.values()))
    width = max(map(len, times))
    yield f"{'':{width}}       step   ratio"
    for row, ours in times.items():
        ratio = statistics.median(one / other for one, other in zip(ours, base, strict=True))
        yield f"{row:{width}} {_text(statistics.median(ours))} {ratio:7.3f}"


def _text(seconds: float) -> str:
    factor, unit = next(((f, u) for f, u in ((1, "s "), (1e3, "ms")) if seconds * f >= 1), (1e6, "µs"))
    return f"{seconds * factor:7.4g} {unit}"
