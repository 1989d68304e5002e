"""What several ranks agree on: a config before training, decisions at the same step."""

import itertools
import logging
import platform
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import hookline

from ..config import CfgNode, ConfigError
from . import comm

__all__ = ["Agreement", "HooksNow", "StopRequest", "refuse_other_configs"]

logger = logging.getLogger(__name__)

# Seconds between exchanges. One takes about 0.4 ms, less than a thousandth of the time.
_PERIOD = 1.0
_EVENTS = ("on_eval", "on_write", "on_save")
# How many seconds a rank waits for the others at a place that some of them may never reach.
_ALL_COME, _ALL_CHANGE = 10.0, 3.0
# All ranks make their agreements in the same order, so an agreement has the same number on all of them.
_numbers = itertools.count()


def refuse_other_configs(cfg: CfgNode, options: Mapping[str, Any]) -> None:
    """Compare the config, the options and the versions of all ranks. Every rank must call it.

    Args:
        cfg: the full config.
        options: of the command line, by name.

    Raises:
        ConfigError: some rank has others than rank 0; the message has the differences. All ranks raise it.
    """
    mine = {key: repr(value) for key, value in {**cfg.flatten(), **options, **_versions()}.items()}
    checksum = zlib.crc32(repr(sorted(mine.items())).encode())
    if len(set(comm.all_gather(checksum))) == 1:
        return
    first: dict[str, str] = comm.broadcast_object(mine)
    keys = [key for key in {**first, **mine} if first.get(key) != mine.get(key)]
    found = [f"{key} is {mine.get(key, 'not there')} (rank 0: {first.get(key, 'not there')})" for key in keys]
    for rank, (node, other) in enumerate(comm.all_gather((platform.node(), found))):
        if other:
            raise ConfigError(
                f"rank {rank}, on {node}, was started with another config than rank 0: {'; '.join(other)}. "
                "Start all machines with the same config, command line and versions"
            )


def _versions() -> dict[str, str]:
    python = ".".join(platform.python_version_tuple()[:2])
    return {"hookline": hookline.__version__, "torch": torch.__version__.partition("+")[0], "Python": python}


@dataclass(frozen=True)
class StopRequest:
    """Why training is to stop.

    Attributes:
        reason: for the log and the result.
        exit_code: not 0 if the run is only interrupted.
        by: the hook that asked, as ``{"hook": its state key, "arguments": its arguments}``; None if no hook did.
    """

    reason: str
    exit_code: int = 0
    by: Mapping[str, Any] | None = None

    def outranks(self, other: "StopRequest | None") -> bool:
        """Whether this request counts, and not an earlier one: only a stop on purpose after an interruption.

        A run that is interrupted in the step that early stopping ends must not train on when it is resumed.
        """
        return other is None or bool(other.exit_code and not self.exit_code)


@dataclass(frozen=True)
class HooksNow:
    """The hooks of a rank.

    Attributes:
        names: of all hooks in their order, including those that join with the next step.
        changes: how many were registered and removed since training began. Two hooks of one class have the same name.
    """

    names: tuple[str, ...]
    changes: int = 0

    @property
    def checksum(self) -> int:
        """The same number on ranks with the same hooks."""
        return zlib.crc32(repr((self.names, self.changes)).encode())


class Agreement:
    """Lets all ranks stop, save, write or evaluate at the end of the same step when one of them asks for it.

    A signal, a time limit or a user's hook may act on one rank alone, but a collective needs all ranks. Ranks exchange
    their requests about once a second. Rank 0 chooses the number of steps until the next exchange from the time that
    steps take, and each exchange tells the others.

    Args:
        first_iter: the first iteration of the run. The first exchange is at the end of that step.
        hooks: the hooks of this rank.

    Attributes:
        alike: whether all ranks have the same hooks. If not, for example if rank 0 alone has a writer and a
            checkpointer (detectron2's way), each rank's hooks act for themselves, and nothing is exchanged for them.
            It changes at an exchange only, so at the same step on all ranks.
        next_iter: the step at whose end ranks exchange next, unless something makes them do so earlier.
        clock: seconds since training began, on rank 0, at the last exchange: the same number on all ranks.
    """

    def __init__(self, first_iter: int, hooks: HooksNow) -> None:
        self.next_iter = first_iter
        self.clock = 0.0
        self._stop: StopRequest | None = None
        self._events: set[str] = set()
        self._began = self._last = time.monotonic()
        self._last_iter = first_iter - 1
        self._steps = 1
        self._group = comm.object_group()
        self._number = next(_numbers)
        self.alike = len(set(comm.all_gather(hooks.names))) == 1
        # The hooks that the other ranks know, and whether a change since then was refused.
        self._known = hooks
        self._asked_in_vain = False

    def ask_to_stop(self, request: StopRequest) -> None:
        """This rank wants to stop."""
        if request.outranks(self._stop):
            self._stop = request

    def ask_for(self, event: str) -> None:
        """This rank wants ``on_eval``, ``on_write`` or ``on_save``."""
        self._events.add(event)

    def exchange(self, iteration: int, hooks: HooksNow) -> tuple[set[str], StopRequest | None]:
        """Exchange requests with the other ranks, which call this at the end of the same step.

        Args:
            iteration: that step.
            hooks: the hooks of this rank. All ranks learn whether they are still the same on all.

        Returns:
            The events that any rank asked for; and the request to stop that counts, if there is one.
        """
        now = time.monotonic()
        steps = self._choose_steps(iteration, now)
        # All ranks get the maximum of each number. Only rank 0 gives a clock and a choice of steps. The maxima of the
        # checksum and of its negative have the same size only if all ranks have the same checksum.
        ours = [float(event in self._events) for event in _EVENTS]
        ours += [float(self._stop is not None), float(hooks.checksum), -float(hooks.checksum)]
        ours += [now - self._began, float(iteration + steps)] if comm.is_main_process() else [0.0, 0.0]
        numbers = torch.tensor(ours, dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        *asked, stop, largest, smallest, self.clock, next_iter = numbers.tolist()
        self.next_iter = int(next_iter)
        self._events.clear()
        self._compare_hooks(hooks, largest == -smallest)
        events = {event for event, any_rank in zip(_EVENTS, asked, strict=True) if any_rank}
        return events, self._first_to_stop() if stop else None

    def may_change(self, iteration: int, hooks: HooksNow) -> bool:
        """Whether hooks that were registered or removed on this rank may join and leave before this step.

        Requests that hooks make ``everywhere`` are not exchanged. So while ranks are alike, either all change their
        hooks at the same step or none does. A rank that changes waits a little for the others. If it is alone, it
        keeps its old hooks until the next exchange, which tells the others.

        Args:
            iteration: the step that is about to begin.
            hooks: the hooks of this rank, with the changes.
        """
        if not self.alike or hooks == self._known:
            return True
        if self._asked_in_vain or not self._all_change(iteration, hooks):
            self._asked_in_vain = True
            return False
        self._known = hooks
        return True

    def _all_change(self, iteration: int, hooks: HooksNow) -> bool:
        """Whether all ranks make this change. It uses the store, since ranks without a change do not call this."""
        store = comm.get_store()
        assert store is not None  # there are several ranks
        key = f"hookline/hooks/{self._number}/{iteration}"
        verdict, mine = f"{key}/verdict", str(hooks.checksum)
        keys = [f"{key}/{rank}" for rank in range(comm.get_world_size())]
        store.set(keys[comm.get_rank()], mine)
        end, pause = time.monotonic() + _ALL_CHANGE, 0.001
        while not (here := store.check(keys)) and not store.check([verdict]) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        all_change = here and all(store.get(one).decode() == mine for one in keys)
        # The first verdict counts for all ranks, also for one that comes too late for another.
        return bool(store.compare_set(verdict, "", "all" if all_change else "some") == b"all")

    def _compare_hooks(self, hooks: HooksNow, same: bool) -> None:
        """Note after an exchange whether the hooks are the same on all ranks."""
        were_alike, self.alike = self.alike, same
        self._known, self._asked_in_vain = hooks, False
        if were_alike and not same:
            ranks: list[HooksNow] = comm.all_gather(hooks, group=self._group)
            logger.warning(
                "Hooks were registered or removed on some ranks only (%s): from now on what all ranks' hooks do at the "
                "same step, such as writing metrics, is done by each rank for itself, without the other ranks' part. "
                "Register and remove hooks on all ranks",
                _differences(ranks),
            )

    def all_stop(self, iteration: int) -> None:
        """A step of this rank was given up by ``StopTraining``: wait for the others, whose steps must be, too.

        Raises:
            TimeoutError: some did not come; the message has their numbers. They may wait in the middle of that step.
        """
        comm.barrier(f"hookline stop {self._number}, iteration {iteration}", timedelta(seconds=_ALL_COME))

    def _first_to_stop(self) -> StopRequest:
        asked: list[StopRequest | None] = comm.all_gather(self._stop, group=self._group)
        self._stop = None
        return min((one for one in asked if one is not None), key=lambda one: bool(one.exit_code))

    def _choose_steps(self, iteration: int, now: float) -> int:
        """After how many steps to ask again. At most twice as many as last time: the first steps are slow ones."""
        seconds = max(now - self._last, 1e-6) / max(iteration - self._last_iter, 1)
        self._last, self._last_iter = now, iteration
        self._steps = max(1, min(2 * self._steps, int(_PERIOD / seconds)))
        return self._steps


def _differences(ranks: Sequence[HooksNow]) -> str:
    """How the other ranks' hooks differ from rank 0's, in words."""
    first = Counter(ranks[0].names)
    found = []
    for rank, hooks in enumerate(ranks[1:], start=1):
        own = Counter(hooks.names)
        if more := ", ".join((own - first).elements()):
            found.append(f"rank {rank} has {more}, which rank 0 has not")
        if fewer := ", ".join((first - own).elements()):
            found.append(f"rank {rank} has no {fewer}, which rank 0 has")
        if own == first and hooks != ranks[0]:
            found.append(f"rank {rank} has made {hooks.changes} changes and rank 0 {ranks[0].changes}")
    return "; ".join(found)
