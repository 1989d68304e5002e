"""Lets all ranks make the same decisions at the same step."""

import itertools
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import comm

__all__ = ["Agreement", "RankHooks", "StopRequest"]

# Seconds between exchanges. One exchange takes about 0.4 ms.
_PERIOD = 1.0
_EVENTS = ("on_eval", "on_write", "on_save")
# Seconds to wait for the other ranks at a place that some of them may never reach.
_WAIT = 10.0
# All ranks create their agreements in the same order, so an agreement has the same number on all of them.
_numbers = itertools.count()


@dataclass(frozen=True)
class StopRequest:
    """A request to stop training.

    Attributes:
        reason: why, for the log and the result.
        exit_code: not 0 if the run is only interrupted and should be resumed.
        by: the hook that requested it, as ``{"hook": its state key, "arguments": its arguments}``; None if no hook did.
    """

    reason: str
    exit_code: int = 0
    by: Mapping[str, Any] | None = None

    def outranks(self, other: "StopRequest | None") -> bool:
        """Whether this request replaces an earlier one: a stop on purpose replaces an interruption.

        If early stopping and an interruption fall into the same step, a resumed run must not continue training.
        """
        return other is None or bool(other.exit_code and not self.exit_code)


@dataclass(frozen=True)
class RankHooks:
    """The hooks of a rank.

    Attributes:
        names: of all hooks in order, including those that join with the next step.
        changes: number of hooks registered and removed since training began. It differs if a hook was replaced by
            another of the same class.
    """

    names: tuple[str, ...]
    changes: int = 0

    @property
    def checksum(self) -> int:
        """A number that is equal on ranks with equal hooks."""
        return zlib.crc32(repr((self.names, self.changes)).encode())


class Agreement:
    """Lets all ranks stop, save, write or evaluate at the end of the same step when one of them asks for it.

    A signal, a time limit or a user's hook may act on one rank alone, but a collective needs all ranks. Ranks exchange
    their requests about once a second. Rank 0 measures the time of a step, chooses how many steps to take until the
    next exchange, and sends that number with each exchange.

    Args:
        first_iter: the first iteration of the run. The first exchange is at the end of that step.
        hooks: the hooks of this rank.

    Attributes:
        same_hooks: whether all ranks have the same hooks. If not, for example if rank 0 alone has a writer and a
            checkpointer (detectron2's way), each rank writes and saves by itself.
        next_iter: the step at whose end ranks exchange next, unless a request makes them exchange earlier.
        clock: seconds since training began, on rank 0, at the last exchange. It is the same on all ranks.
    """

    def __init__(self, first_iter: int, hooks: RankHooks) -> None:
        self.next_iter = first_iter
        self.clock = 0.0
        self._stop: StopRequest | None = None
        self._events: set[str] = set()
        self._began = self._last = time.monotonic()
        self._last_iter = first_iter - 1
        self._steps = 1
        self._group = comm.object_group()
        self._number = next(_numbers)
        self.same_hooks = len(set(comm.all_gather(hooks.names))) == 1
        self._hooks = hooks

    def needs_exchange(self, event: str, everywhere: bool) -> bool:
        """Whether this rank must ask the others before it acts on a request.

        Args:
            event: "stop", "on_eval", "on_write" or "on_save".
            everywhere: whether all ranks make this request in this step.
        """
        if self.same_hooks:
            return not everywhere
        return event in ("stop", "on_eval")  # each rank writes and saves by itself

    def ask(self, request: str | StopRequest) -> None:
        """Send an event or a request to stop to the other ranks, with the next exchange."""
        if isinstance(request, str):
            self._events.add(request)
        elif request.outranks(self._stop):
            self._stop = request

    def exchange(
        self, iteration: int, hooks: RankHooks, settings: Mapping[str, Any] | None = None
    ) -> tuple[set[str], StopRequest | None]:
        """Exchange requests with the other ranks, which call this at the end of the same step.

        Args:
            iteration: that step.
            hooks: the hooks of this rank.
            settings: what must be the same on all ranks, by name, such as learning rates.

        Returns:
            The events that any rank asked for, and the request to stop with the highest priority, if there is one.

        Raises:
            RuntimeError: hooks were registered or removed on some ranks only, or settings differ.
        """
        now = time.monotonic()
        steps = self._choose_steps(iteration, now)
        # All ranks get the maximum of each number. Only rank 0 sends a clock and a number of steps. The maxima of a
        # checksum and of its negative are of equal size only if all ranks have the same checksum.
        sums = float(hooks.checksum), float(zlib.crc32(repr(settings).encode()))
        ours = [float(event in self._events) for event in _EVENTS]
        ours += [float(self._stop is not None), *sums, *(-one for one in sums)]
        ours += [now - self._began, float(iteration + steps)] if comm.is_main_process() else [0.0, 0.0]
        numbers = torch.tensor(ours, dtype=torch.float64)
        work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        if iteration < self.next_iter and hooks != self._hooks:
            self._wait_briefly(work, iteration)
        else:
            work.wait()
        *asked, stop, largest, settings_sum, smallest, least, self.clock, next_iter = numbers.tolist()
        self.next_iter = int(next_iter)
        self._events.clear()
        self._hooks = hooks
        if self.same_hooks and largest != -smallest:
            ranks: list[RankHooks] = comm.all_gather(hooks, group=self._group)
            raise RuntimeError(f"{_ONE_RANK} ({_differences(ranks)}). {_ALL_RANKS}")
        if settings_sum != -least:
            raise RuntimeError(_other_settings(comm.all_gather(settings or {}, group=self._group), iteration))
        events = {event for event, any_rank in zip(_EVENTS, asked, strict=True) if any_rank}
        return events, self._first_stop() if stop else None

    def _wait_briefly(self, work: dist.Work, iteration: int) -> None:
        """Wait for an exchange that a hook caused which other ranks may not have."""
        try:
            work.wait(timedelta(seconds=_WAIT))
        except RuntimeError as error:
            raise RuntimeError(
                f"{_ONE_RANK}: those of rank {comm.get_rank()} made a request at iteration {iteration}, and those "
                f"of other ranks did not within {_WAIT:g} s ({error}). {_ALL_RANKS}"
            ) from None

    def wait_for_stop(self, iteration: int, reason: str) -> None:
        """Wait until all ranks have given up this step by ``StopTraining``.

        Raises:
            RuntimeError: some ranks did not, and may wait in the middle of the step. The message has their numbers.
        """
        try:
            comm.barrier(f"hookline stop {self._number}, iteration {iteration}", _WAIT)
        except TimeoutError as missing:
            raise RuntimeError(
                f"StopTraining({reason!r}) was raised in step {iteration} of rank {comm.get_rank()}, and not on "
                f"all ranks: the others cannot finish this step ({missing}). To stop from one rank, call "
                "trainer.request_stop(reason) instead: all ranks then stop after the same step"
            ) from None  # as a cause, the barrier's timeout would count as the failure

    def _first_stop(self) -> StopRequest:
        asked: list[StopRequest | None] = comm.all_gather(self._stop, group=self._group)
        self._stop = None
        return min((one for one in asked if one is not None), key=lambda one: bool(one.exit_code))

    def _choose_steps(self, iteration: int, now: float) -> int:
        """The number of steps until the next exchange: at most twice the last one, since the first steps are slow."""
        seconds = max(now - self._last, 1e-6) / max(iteration - self._last_iter, 1)
        self._last, self._last_iter = now, iteration
        self._steps = max(1, min(2 * self._steps, int(_PERIOD / seconds)))
        return self._steps


_ONE_RANK = "hooks were registered or removed on some ranks only"
_ALL_RANKS = "Register and remove hooks on all ranks at the same step"


def _differences(ranks: Sequence[RankHooks]) -> str:
    """How the other ranks' hooks differ from rank 0's, in words."""
    first = Counter(ranks[0].names)
    found = []
    for rank, hooks in enumerate(ranks[1:], start=1):
        own = Counter(hooks.names)
        if more := ", ".join((own - first).elements()):
            found.append(f"rank {rank} has {more}, rank 0 does not")
        if fewer := ", ".join((first - own).elements()):
            found.append(f"rank 0 has {fewer}, rank {rank} does not")
        if own == first and hooks != ranks[0]:
            found.append(f"rank {rank} made {hooks.changes} changes, rank 0 {ranks[0].changes}")
    return "; ".join(found)


def _other_settings(ranks: Sequence[Mapping[str, Any]], iteration: int) -> str:
    """Return the error for settings that differ between ranks."""
    first = ranks[0]
    found = [
        f"{key} is {other.get(key, 'missing')} on rank {rank} and {first.get(key, 'missing')} on rank 0"
        for rank, other in enumerate(ranks)
        for key in {**first, **other}
        if repr(first.get(key)) != repr(other.get(key))
    ]
    return (
        f"the ranks' weights drift apart: at iteration {iteration} {'; '.join(found[:3])}. Change learning rates and "
        "other settings of the optimizer on all ranks at the same step"
    )
