"""What several ranks decide together, at the same step."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import comm

__all__ = ["Agreement"]

# How often ranks ask each other, in seconds. It takes them some 0.4 ms: less than a thousandth of the time.
_PERIOD = 1.0
_EVENTS = ("on_eval", "on_write", "on_save")


class Agreement:
    """Brings what one rank asks for to all of them: to stop, save, write or evaluate at the end of the same step.

    A signal, a time limit or a user's hook may act on one rank alone, while a collective needs all ranks. So what is
    asked for on any rank is exchanged every so many steps, about once a second, and then holds on all. How many steps
    that are is rank 0's choice, made of the time that steps took; the exchange itself tells the others.

    Args:
        first_iter: of the run. The first exchange is at the end of that step.
        hooks: names of this rank's hooks, in their order.

    Attributes:
        alike: whether all ranks have the same hooks. If not, as where rank 0 alone has a writer and a checkpointer
            (detectron2's way), what these do is left to each rank, and nothing is exchanged for it.
        next_iter: the step at whose end ranks exchange next, if nothing makes them do it before.
        clock: seconds since training began, on rank 0, at the last exchange: the same number on all ranks.
    """

    def __init__(self, first_iter: int, hooks: Sequence[str] = ()) -> None:
        self.next_iter = first_iter
        self.clock = 0.0
        self._stop: tuple[str, int] | None = None
        self._events: set[str] = set()
        self._began = self._last = time.monotonic()
        self._last_iter = first_iter - 1
        self._steps = 1
        self._group = comm.object_group()
        self.alike = all(names == list(hooks) for names in comm.all_gather(list(hooks)))

    def ask_to_stop(self, reason: str, exit_code: int) -> None:
        """This rank wants to stop; the first reason it has counts."""
        if self._stop is None:
            self._stop = (reason, exit_code)

    def ask_for(self, event: str) -> None:
        """This rank wants ``on_eval``, ``on_write`` or ``on_save``."""
        self._events.add(event)

    def exchange(self, iteration: int) -> tuple[set[str], tuple[str, int] | None]:
        """Ask the other ranks, which do so at the end of the same step.

        Args:
            iteration: that step.

        Returns:
            The events that any rank asked for; and why to stop and with which exit code, if any rank wants to.
        """
        now = time.monotonic()
        steps = self._choose_steps(iteration, now)
        # The largest of each is what all get: of rank 0's clock and choice, since the others give none.
        ours = [float(event in self._events) for event in _EVENTS]
        ours += [float(self._stop is not None)]
        ours += [now - self._began, float(iteration + steps)] if comm.is_main_process() else [0.0, 0.0]
        numbers = torch.tensor(ours, dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        *asked, stop, self.clock, next_iter = numbers.tolist()
        self.next_iter = int(next_iter)
        self._events.clear()
        events = {event for event, any_rank in zip(_EVENTS, asked, strict=True) if any_rank}
        return events, self._first_to_stop() if stop else None

    def _first_to_stop(self) -> tuple[str, int]:
        asked: list[Any] = comm.all_gather(self._stop, group=self._group)
        self._stop = None
        reason, exit_code = next(one for one in asked if one is not None)
        return reason, exit_code

    def _choose_steps(self, iteration: int, now: float) -> int:
        """After how many steps to ask again. At most twice as many as last time: the first steps are slow ones."""
        seconds = max(now - self._last, 1e-6) / max(iteration - self._last_iter, 1)
        self._last, self._last_iter = now, iteration
        self._steps = max(1, min(2 * self._steps, int(_PERIOD / seconds)))
        return self._steps
