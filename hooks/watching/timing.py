"""Time per step and cost of hooks."""

import datetime
import logging
import time
from typing import Any

import torch

from ..base import HOOK_REGISTRY, HookBase

__all__ = ["ForwardTimer", "IterationTimer"]

logger = logging.getLogger(__name__)

_LARGE = 0.01  # hooks with a larger share of the run's time are reported on the console


@HOOK_REGISTRY.register()
class IterationTimer(HookBase):
    """Puts the seconds of each step as ``time``. At the end, logs the speed of the run and the cost of each hook.

    A step lasts from ``before_step`` to ``after_step``. Register this hook first, so that the time of other hooks in
    ``after_step`` does not count; it is reported separately.

    Args:
        warmup_iter: number of steps at the start that do not count in the report. The last of them is put.
    """

    single = True

    def __init__(self, warmup_iter: int = 3) -> None:
        self._warmup_iter = warmup_iter

    def before_train(self) -> None:
        self._first = self.trainer.start_iter
        self._start = self._step_start = time.perf_counter()
        self._counted_from = self._start
        self._steps_time = 0.0
        self._steps = 0
        self._ending = False

    def before_step(self) -> None:
        self._step_start = time.perf_counter()

    def after_step(self) -> None:
        now = time.perf_counter()
        trainer = self.trainer
        seconds = now - self._step_start
        done = trainer.iter - self._first + 1
        if done > self._warmup_iter:
            self._steps += 1
            self._steps_time += seconds
        else:
            self._counted_from = now
        # A resumed run puts all, so that its metrics have the same rows as an uninterrupted run's.
        if done >= self._warmup_iter or self._first:
            trainer.storage.put_scalar("time", seconds)

    def after_train(self) -> None:
        self._ending = True

    def before_write(self) -> None:
        if self._ending and self._steps:  # after after_train of all hooks
            self._report()

    def _report(self) -> None:
        total = time.perf_counter() - self._counted_from
        logger.info(
            "Overall training speed: %d iterations in %s (%.4g s / it)",
            self._steps,
            _duration(self._steps_time),
            self._steps_time / self._steps,
        )
        rest = max(total - self._steps_time, 0.0)
        logger.info("Total training time: %s (%s on hooks)", _duration(total), _duration(rest))
        self._report_hooks(time.perf_counter() - self._start)

    def _report_hooks(self, total: float) -> None:
        costs = {name: cost for name, cost in self.trainer.hook_costs().items() if cost[1]}
        lines = []
        for name, (seconds, calls) in costs.items():
            line = f"  {name:<28} {format_seconds(seconds):>10} {format_seconds(seconds / calls):>10}"
            lines.append((seconds / total, f"{line} {seconds / total:>7.1%}"))
        title = f"  {'hook':<28} {'total':>10} {'per call':>10} {'share':>7}"
        large = [line for share, line in lines if share > _LARGE]
        if large:
            logger.info("Time spent in hooks (above %.0f%%):\n%s", 100 * _LARGE, "\n".join([title, *large]))
        if len(large) < len(lines):
            logger.debug("Time spent in all hooks:\n%s", "\n".join([title, *(line for _, line in lines)]))


@HOOK_REGISTRY.register()
class ForwardTimer(HookBase):
    """Puts the seconds of each step's forward passes as ``forward_time``.

    With several ranks, ``slowest_rank`` then counts forward passes too. On a GPU the time is that between two CUDA
    events, which are read one step later and only if they are complete, so no step waits. With FSDP2 the forward pass
    includes waiting for other ranks' shards.
    """

    single = True

    def before_train(self) -> None:
        self._cuda = next((p.device for p in self.trainer.model.parameters() if p.is_cuda), None)
        self._seconds, self._start = 0.0, 0.0
        self._events: list[tuple[Any, Any]] = []
        self._earlier: list[tuple[Any, Any]] = []

    def before_forward(self, batch: Any) -> None:
        if self._cuda is None:
            self._start = time.perf_counter()
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(torch.cuda.current_stream(self._cuda))
            self._events.append((begin, end))

    def before_backward(self, losses: torch.Tensor) -> None:
        if self._cuda is None:
            self._seconds += time.perf_counter() - self._start
        else:
            self._events[-1][1].record(torch.cuda.current_stream(self._cuda))

    def after_step(self) -> None:
        if self._cuda is None:
            self.trainer.storage.put_scalar("forward_time", self._seconds)
            self._seconds = 0.0
            return
        if self._earlier and all(end.query() for _, end in self._earlier):
            milliseconds = sum(begin.elapsed_time(end) for begin, end in self._earlier)
            self.trainer.storage.put_scalar("forward_time", milliseconds / 1000)
        self._earlier, self._events = self._events, []


def format_seconds(seconds: float) -> str:
    """Format a time in seconds, milliseconds or microseconds."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))
