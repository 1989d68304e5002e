"""Finds and reports the rank that failed first.

The ranks share a key-value store. The launcher (``launch`` or torchrun) keeps it, so it outlives the ranks. The first
rank that fails writes its failure there.

A collective that times out or loses its connection fails on a healthy rank. That rank requests the others'
status. A rank that does not answer, has left early or hangs is then reported as the one that failed first.
"""

import contextlib
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ...config import ConfigError
from .. import comm

__all__ = [
    "CLEAN_EXIT_CODES",
    "STATUS_REQUEST",
    "Failure",
    "ends_without_answer",
    "failure_behind",
    "read_statuses",
    "shown_stack",
    "waits",
    "write_status",
]

CLEAN_EXIT_CODES = (0, 75, 130)
"""Exit codes that are not failures: done, stopped to be resumed (EX_TEMPFAIL), interrupted."""

STATUS_REQUEST = "hookline/status_request"
"""Key that exists when a rank has failed or wants to know the status of the others."""

_FAILURE = "hookline/failure"
# Seconds within which a rank answers a status request, unless its process has ended or is blocked.
_ANSWER = 3.0
# Seconds for all exchanges with the store after a failure. Usually they take less than _ANSWER.
_NO_ANSWER = 20.0
# Number of lines of a stack trace in an error message.
_FRAMES = 12


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: the rank.
        kind: "config" (invalid input), "interrupted" (KeyboardInterrupt), "exception", "killed" (by a signal), "left"
            (ended before the others were done) or "hung".
        text: the message or the traceback.
        code: the exit code of a rank that left, if known.
    """

    rank: int
    kind: str
    text: str
    code: int | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failure":
        """Create it from an exception that ends a rank."""
        if isinstance(error, ConfigError):
            return cls(rank, "config", str(error))
        kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "exception"
        return cls(rank, kind, "".join(traceback.format_exception(error)).rstrip())

    @classmethod
    def first(cls, store: "dist.Store") -> "Failure | None":
        """Return the first failure; None if there was none, or if the store is gone because the launcher has ended."""
        try:
            return cls(*json.loads(store.get(_FAILURE))) if store.check([_FAILURE]) else None
        except RuntimeError:
            return None

    def report(self, store: "dist.Store") -> "Failure":
        """Write this failure to the store unless there is one already. Returns the first failure."""
        try:
            mine = json.dumps([self.rank, self.kind, self.text, self.code])
            first = Failure(*json.loads(store.compare_set(_FAILURE, "", mine)))
            store.set(STATUS_REQUEST, "")
            return first
        except RuntimeError:  # the store is gone
            return self

    def describe(self) -> str:
        """Return the text for a log."""
        return f"Rank {self.rank} {self.how} first:\n{self.text}"

    @property
    def how(self) -> str:
        """A verb, such as "failed"."""
        return {"interrupted": "was interrupted", "left": "left", "hung": "hung"}.get(self.kind, "failed")


@contextlib.contextmanager
def ends_without_answer(who: str) -> Iterator[None]:
    """Exit with code 1 if the body takes longer than 20 s: calls of a store behind a broken network never return.

    Args:
        who: what ends, for the message.
    """

    def end() -> None:
        sys.stderr.write(f"{who} is ended: the run's store does not answer. Machine 0 or the network to it is lost\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(_NO_ANSWER, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# ---------------------------------------------------------------------- the status of the ranks


def write_status(store: "dist.Store", rank: int, state: str, text: str = "", code: int = 0) -> None:
    """Write the status of a rank to the store. Later calls for the same rank are ignored.

    Args:
        store: the store.
        rank: the rank.
        state: "works", "fails" or "left".
        text: the stack of a rank that works; how a rank left.
        code: the exit code of a rank that left.
    """
    with contextlib.suppress(RuntimeError):  # the store is gone
        store.compare_set(_status_key(rank), "", json.dumps([state, text, code]))


def _status_key(rank: int) -> str:
    return f"hookline/status/{rank}"


def read_statuses(store: "dist.Store", ranks: Iterable[int]) -> dict[int, tuple[str, str, int]]:
    """Return the status of each rank that has written one: state, text and code of :func:`write_status`."""
    there = [rank for rank in ranks if store.check([_status_key(rank)])]
    return {rank: json.loads(store.get(_status_key(rank))) for rank in there}


def shown_stack(lines: Sequence[str]) -> str:
    """Return the innermost lines of a stack trace."""
    return "".join(lines[-_FRAMES:]).rstrip()


def waits(stack: str, here: traceback.FrameSummary | None = None) -> bool:
    """Return whether a rank waits in a collective, judged by the innermost line of its stack.

    Args:
        stack: the stack.
        here: where another rank waits. The same line is a collective.
    """
    innermost = [line for line in stack.splitlines() if line.lstrip().startswith("File ")][-1]
    places = [os.path.join("torch", "distributed", ""), comm.__file__]
    if here is not None:
        places.append(f'"{here.filename}", line {here.lineno},')
    return any(place in innermost for place in places)


# ---------------------------------------------------------------------- the cause of an error


def failure_behind(error: BaseException, store: "dist.Store", rank: int, world_size: int, seconds: float) -> Failure:
    """Return the failure that caused an error on this rank, perhaps that of another rank.

    Args:
        error: the error.
        store: the store.
        rank, world_size: of this process.
        seconds: how long collectives wait.
    """
    own = Failure.of(error, rank)
    cause: BaseException | None = error
    while cause is not None and not _is_of_collective(cause):
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    if cause is None:
        return own
    try:
        return _ask_the_others(cause, own, store, world_size, seconds)
    except RuntimeError:  # the store is gone
        return own


def _is_of_collective(error: BaseException) -> bool:
    """Whether a collective raised the error: a timeout or a lost connection."""
    from_torch = isinstance(error, RuntimeError) and ("gloo/" in str(error) or "NCCL" in str(error))
    return from_torch or isinstance(error, dist.DistError | comm.BarrierTimeoutError)


def _ask_the_others(
    error: BaseException, own: Failure, store: "dist.Store", world_size: int, seconds: float
) -> Failure:
    store.set(STATUS_REQUEST, "")
    end = time.monotonic() + _ANSWER
    while not store.check([_status_key(rank) for rank in range(world_size)]) and time.monotonic() < end:
        if store.check([_FAILURE]):
            break
        time.sleep(0.02)
    if first := Failure.first(store):
        return first
    answers = read_statuses(store, range(world_size))
    waited = f"Rank {own.rank} waited for it here:\n{shown_stack(traceback.format_tb(error.__traceback__))}"
    for rank in range(world_size):
        state, text, code = answers.get(rank, ("", "", 0))
        if not state:
            return Failure(rank, "left", f"it does not answer: its process ended or is blocked. {waited}")
        if state == "left":
            return Failure(rank, "left", f"{text}\nexit code {code}. {waited}", code)
    if not isinstance(error, comm.BarrierTimeoutError) and not re.search("time(d )?out", str(error), re.IGNORECASE):
        return own
    here = traceback.extract_tb(error.__traceback__)[-1]
    stacks = {rank: stack for rank, (state, stack, _) in answers.items() if state == "works" and rank != own.rank}
    for rank, stack in stacks.items():
        if not waits(stack, here):
            return Failure(rank, "hung", f"others waited {seconds:g} s for it while it was here:\n{stack}\n{waited}")
    # All ranks wait, in collectives that do not match.
    texts = [f"Rank {rank} was here:\n{stack}" for rank, stack in stacks.items()]
    return Failure(own.rank, "exception", "\n".join([own.text, *texts]))
