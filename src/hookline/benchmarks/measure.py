"""Timing: candidates run in turns, so that a slow moment of the machine affects all; the median counts."""

import gc
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

import torch

from ..engine import SimpleTrainer
from ..engine.setup.logger import setup_logger
from ..hooks import HookBase


def _after_gpu() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time, "gpu": _after_gpu}
"""Wall time; CPU time of all threads of this process, which other processes disturb less; or wall time when the GPU has
finished what it was given."""

Run = Callable[[int], float]
"""Runs a number of steps and returns the seconds."""

_clock = time.perf_counter


def use_clock(name: str) -> None:
    """Use one of :data:`CLOCKS` from now on."""
    global _clock
    _clock = CLOCKS[name]


def now() -> float:
    """Seconds on the clock in use."""
    return _clock()


def all_times(runs: dict[str, Run], steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each run, in each round.

    Args:
        runs: by name.
        steps: in each round.
        rounds: number of rounds, after one warm-up round. Every other round runs in reverse order, since a run can slow
            down the next one (a busy disk).
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in runs if number % 2 else reversed(runs):
            gc.collect()
            seconds = runs[name](steps) / steps
            if number:
                times[name].append(seconds)
    return times


def interleaved(runs: dict[str, Run], steps: int, rounds: int) -> dict[str, float]:
    """Median seconds per step of each run; see :func:`all_times`."""
    return {name: statistics.median(times) for name, times in all_times(runs, steps, rounds).items()}


def ratios(seconds: dict[str, float], base: str) -> dict[str, dict[str, float]]:
    """Microseconds per step, and the ratio to ``base``."""
    return {
        name: {"us_per_step": round(value * 1e6, 1), "ratio": round(value / seconds[base], 3)}
        for name, value in seconds.items()
    }


class StepClock(HookBase):
    """Measures the time from the start of step ``WARM_UP`` to the start of the step ``steps`` later."""

    WARM_UP = 20
    needs_each_step = False

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.seconds = 0.0

    def before_step(self) -> None:
        iteration = self.trainer.iter
        if iteration == self.WARM_UP:
            self._start = now()
        elif iteration == self.WARM_UP + self._steps:
            self.seconds = now() - self._start


def timed(trainer: SimpleTrainer) -> Run:
    """Time the steps of a trainer, without the start and end of its training."""

    def run(steps: int) -> float:
        clock = StepClock(steps)
        trainer.register_hooks([clock])
        SimpleTrainer.train(trainer, 0, steps + StepClock.WARM_UP + 1)
        trainer.remove_hook(clock)
        return clock.seconds

    return run


def repeated(act: Callable[[], object]) -> Run:
    """Time an act that is repeated."""

    def run(steps: int) -> float:
        start = now()
        for _ in range(steps):
            act()
        return now() - start

    return run


@contextmanager
def usual_logging() -> Iterator[None]:
    """Set up logging as in a run: every line is formatted and written to the console, and to the run's log.txt.

    The console is ``os.devnull``, since the time of a terminal is not the engine's.
    """
    logger = logging.getLogger("hookline")
    before = logger.handlers[:], logger.level, logger.propagate
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        logger.handlers = []
        setup_logger()  # the run adds its log.txt
        try:
            yield
        finally:
            logger.handlers, level, logger.propagate = before
            logger.setLevel(level)
