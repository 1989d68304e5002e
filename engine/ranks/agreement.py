"""Lets all ranks make the same decisions at the same step, and combines their metrics."""

import itertools
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...hooks.event_storage import EventStorage
from ...hooks.history_buffer import combine
from .. import comm

__all__ = ["Agreement", "RankHooks", "StopRequest", "as_failure", "share_metrics"]

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
    """

    reason: str
    exit_code: int = 0

    def outranks(self, other: "StopRequest | None") -> bool:
        """Whether this request replaces an earlier one: a stop on purpose replaces an interruption.

        If early stopping and an interruption fall into the same step, a resumed run must not continue training.
        """
        return other is None or bool(other.exit_code and not self.exit_code)


def as_failure(error: SystemExit, iteration: int) -> RuntimeError:
    """Return an error for a ``sys.exit(0)`` during training, which would look like a run that completed."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    where = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    failure = RuntimeError(
        f"sys.exit({'' if error.code is None else error.code}) was called at iteration {iteration} ({where}), before "
        "the run had ended. To stop training, call trainer.request_stop(reason)"
    )
    failure.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        failure.add_note(note)
    return failure


class RankHooks(NamedTuple):
    """The hooks of a rank.

    Attributes:
        names: of all hooks in order, including those that join with the next step.
        changes: number of hooks registered and removed since training began. It differs if a hook was replaced by
            another of the same class.
    """

    names: tuple[str, ...]
    changes: int = 0


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
        same = hooks if self.same_hooks else None, settings
        checksum = float(zlib.crc32(repr(same).encode()))
        ours = [float(event in self._events) for event in _EVENTS]
        ours += [float(self._stop is not None), checksum, -checksum]
        ours += [now - self._began, float(iteration + steps)] if comm.is_main_process() else [0.0, 0.0]
        numbers = torch.tensor(ours, dtype=torch.float64)
        work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        if iteration < self.next_iter and hooks != self._hooks:
            self._wait_briefly(work, iteration)
        else:
            work.wait()
        *asked, stop, largest, smallest, self.clock, next_iter = numbers.tolist()
        self.next_iter = int(next_iter)
        self._events.clear()
        self._hooks = hooks
        if largest != -smallest:
            raise RuntimeError(_differences(comm.all_gather(same, group=self._group), iteration))
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


def _differences(ranks: Sequence[tuple[RankHooks | None, Mapping[str, Any] | None]], iteration: int) -> str:
    """Return the error for hooks or settings that differ from rank 0's."""
    (hooks, settings), found = ranks[0], []
    for rank, (other, _) in enumerate(ranks):
        if hooks is None or other is None or other == hooks:
            continue
        more = [
            f"rank {rank} has {name}, rank 0 does not" for name in (Counter(other[0]) - Counter(hooks[0])).elements()
        ]
        less = [
            f"rank 0 has {name}, rank {rank} does not" for name in (Counter(hooks[0]) - Counter(other[0])).elements()
        ]
        found += more + less or [f"rank {rank} made {other.changes} changes, rank 0 {hooks.changes}"]
    if found:
        return f"{_ONE_RANK} ({'; '.join(found)}). {_ALL_RANKS}"
    first = settings or {}
    found = [
        f"{key} is {(other or {}).get(key, 'missing')} on rank {rank} and {first.get(key, 'missing')} on rank 0"
        for rank, (_, other) in enumerate(ranks)
        for key in {**first, **(other or {})}
        if repr(first.get(key)) != repr((other or {}).get(key))
    ]
    return (
        f"the ranks' weights drift apart: at iteration {iteration} {'; '.join(found[:3])}. Change learning rates and "
        "other settings of the optimizer on all ranks at the same step"
    )


# ---------------------------------------------------------------------- metrics


def share_metrics(storage: EventStorage, iteration: int) -> None:
    """Replace this rank's losses since the last call by the means over all ranks, in one exchange; other metrics by
    the sum or maximum, as ``put_scalar(..., over_ranks=...)`` says.

    Every rank must call it at the same step. It also puts ``slowest_rank``, the rank that spent the most time on its
    data. In the backward pass a rank waits for the others.

    Args:
        storage: its ``over_ranks`` has the names of the losses and other metrics.
        iteration: the last finished iteration.
    """
    histories, until = storage.histories(), storage.shared_until

    def since(name: str) -> dict[int, float]:
        """This rank's values of a metric after the last call, by iteration."""
        history = histories.get(name)
        return {} if history is None else {it: value for value, it in history.tail(history.count_since(until))}

    mine = {name: since(name) for name in sorted(storage.over_ranks)}
    seconds = list(since("data_time").values())
    parts: list[tuple[dict[str, dict[int, float]], float]] = comm.all_gather((mine, sum(seconds)))
    for name, own in mine.items():
        there = [part.get(name, {}) for part, _ in parts]
        how = storage.over_ranks[name]
        if own:
            storage.replace(name, {it: combine(how, [o[it] for o in there if it in o], len(parts)) for it in own})
    storage.shared_until = iteration
    if seconds:
        times = [time for _, time in parts]
        storage.put_scalar("slowest_rank", times.index(max(times)), smoothing_hint=False, cur_iter=iteration)
