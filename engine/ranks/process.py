"""A process of several: joins the other ranks, runs a function, leaves, and reports which rank failed first.

The ranks share a key-value store. The launcher (``launch`` or torchrun) keeps it, so it outlives the ranks. The first
rank that fails writes its failure there. A thread of each rank looks twice a second whether another rank has failed. A
rank that is still running a few seconds after a failure writes its stack traces and exits.

A collective that times out or loses its connection fails on a healthy rank. That rank requests the others'
status. A rank that does not answer, has left early or hangs is then reported as the one that failed first.
"""

import contextlib
import faulthandler
import json
import logging
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...config import ConfigError
from .. import comm

__all__ = [
    "CLEAN_EXIT_CODES",
    "DUMP_SIGNAL",
    "Failure",
    "ends_without_answer",
    "read_statuses",
    "run_rank",
    "waits",
    "watch_parent",
]

logger = logging.getLogger(__name__)

CLEAN_EXIT_CODES = (0, 75, 130)
"""Exit codes that are not failures: done, stopped to be resumed (EX_TEMPFAIL), interrupted."""

DUMP_SIGNAL = signal.SIGURG
"""A process that gets this signal writes its stack traces to standard error, even if its interpreter is blocked. By
default it is ignored, so it does not harm a process that does not handle it yet."""

# Key of the store that exists when a rank has failed or wants to know the status of the others.
_STATUS_REQUEST = "hookline/status_request"
_FAILURE = "hookline/failure"
_LOOK_EVERY = 0.5
# Seconds until a rank is ended after another one failed.
_GRACE = 4.0
# Seconds that a rank that is done waits for the others before its process ends.
_LEAVE = 5.0
# Seconds within which a rank answers a status request, unless its process has ended or is blocked.
_ANSWER = 3.0
# Seconds for all exchanges with the store after a failure. Usually they take less than _ANSWER.
_NO_ANSWER = 20.0


def run_rank(
    main_func: Callable[..., Any], args: tuple[Any, ...], store: dist.TCPStore, timeout: timedelta, cuda: bool
) -> Any:
    """Join the other ranks, run ``main_func(*args)``, and leave when all are done.

    The environment has the place of this process among them: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE.

    Args:
        main_func: the function.
        args: its arguments.
        store: where the ranks meet. The launcher keeps it.
        timeout: how long a collective waits for the others.
        cuda: whether it uses the GPU of its local rank.

    Returns:
        What ``main_func`` returns.

    Raises:
        Exception: what ``main_func`` raises, after it was reported to the other ranks.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    stop = threading.Event()
    # The thread needs its own connection: a connection that one thread waits on is blocked for the others.
    own: dist.Store = store.clone()  # type: ignore[attr-defined]
    threading.Thread(target=_watch, args=(own, rank, stop), daemon=True, name="hookline-watch").start()
    try:
        _meet(store, rank, world_size, timeout.total_seconds())
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        result = main_func(*args)
        all_done = _leave(store, rank, timeout, 0, "its function returned; its exit code was 0")
    except (SystemExit, KeyboardInterrupt) as end:
        value = 130 if isinstance(end, KeyboardInterrupt) else end.code
        code = value if isinstance(value, int) else int(value is not None)
        where = "".join(traceback.format_tb(end.__traceback__)[-1:]).strip()
        text = f"it ended by {end!r}; its exit code was {code}:\n  {where}"
        if not _leave(store, rank, timeout, code, text) and code not in CLEAN_EXIT_CODES:
            Failure(rank, "left", text).report(store)
        raise
    except BaseException as error:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it at once, and waits 30 s
        with ends_without_answer():
            write_status(store, rank, "fails")
            first = failure_behind(error, store, rank, world_size, timeout.total_seconds()).report(store)
        if first.rank != rank and not first.is_config_error:
            # The first failure is the last entry of the log, after the errors that follow from it.
            logger.error("%s", first.describe())
            error.add_note(first.describe())  # torchrun shows the error of a rank
        elif first.how == "failed" and not getattr(error, "logged_by_trainer", False):
            logger.error("Rank %d fails", rank, exc_info=error)
        raise
    finally:
        stop.set()
    if all_done:
        dist.destroy_process_group()
    return result


# ---------------------------------------------------------------------- joining and leaving


def _meet(store: dist.TCPStore, rank: int, world_size: int, seconds: float) -> None:
    """Wait until all ranks are there.

    Raises:
        ConfigError: ranks are missing after the timeout, or machines have different numbers of processes.
    """
    size = f"expects {world_size} processes"
    mine = f"{platform.node()} {size}, {os.environ.get('LOCAL_WORLD_SIZE')} of them its own"
    first = store.compare_set("hookline/sizes", "", mine).decode()
    if size not in first:
        raise ConfigError(f"{mine}; {first}. Start all machines with the same --num-machines and --num-gpus")
    if store.add(f"hookline/rank/{rank}", 1) > 1:
        raise ConfigError(f"rank {rank} is there already: give each machine its own --machine-rank")
    failed = lambda: Failure.first(store) is not None  # noqa: E731
    missing = comm.missing_ranks(store, "hookline/here", rank, world_size, seconds, failed)
    if failure := Failure.first(store):
        raise failure.config_error() if failure.is_config_error else RuntimeError(failure.describe())
    if missing:
        raise ConfigError(
            f"rank(s) {', '.join(missing)} did not join within {seconds:g} s "
            "(PARALLEL.TIMEOUT): start all machines, with the same number of processes on each"
        )


def _leave(store: "dist.Store", rank: int, timeout: timedelta, code: int, how: str) -> bool:
    """Wait a few seconds until the other ranks are done; returns whether they are.

    A process that ends closes its connections. A rank that waits for it in a collective then fails at once.
    """
    write_status(store, rank, "left", how)
    # To torchrun, each exit code but 0 is a failure: it would end the others, which may be writing checkpoints.
    patient = code in CLEAN_EXIT_CODES and code and dist.is_torchelastic_launched()
    try:
        comm.barrier("leave", timeout.total_seconds() if patient else _LEAVE)
    except (TimeoutError, RuntimeError):  # the store is gone once the slowest rank has come
        return False
    return True


# ---------------------------------------------------------------------- threads that watch


def _watch(store: "dist.Store", rank: int, stop: threading.Event) -> None:
    """Write the status of this rank when it is requested; end the process some time after another rank failed."""
    while not stop.wait(_LOOK_EVERY):
        try:
            if not store.check([_STATUS_REQUEST]):
                continue
        except RuntimeError:  # the launcher was killed; watch_parent() notices that
            return
        frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
        write_status(store, rank, "works", shown_stack(traceback.format_stack(frame)))
        failure = Failure.first(store)
        if failure is None:
            continue
        if stop.wait(_GRACE):
            return
        if not failure.is_config_error:
            logger.error("%s", failure.describe())
        sys.stderr.write(
            f"rank {rank} is ended: rank {failure.rank} {failure.how}, and this one did not end by itself; "
            f"stacks of its threads:\n"
        )
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


def watch_parent(parent: int, grace: float = 60.0) -> None:
    """Send SIGTERM to this process when the process that started it is killed; end it some time after.

    Args:
        parent: the number of that process.
        grace: seconds until this process is ended.
    """

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            time.sleep(_GRACE)  # training may have ended: another rank noticed it first, and all stop at one step
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="hookline-parent").start()


# ---------------------------------------------------------------------- failures


class Failure(NamedTuple):
    """How a rank failed.

    Attributes:
        rank: the rank.
        how: "failed", "left" (ended before the others were done), "hung", or "was refused", if it had trained
            "was refused in training" (a ConfigError).
        text: the message or the traceback.
    """

    rank: int
    how: str
    text: str

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
            first = Failure(*json.loads(store.compare_set(_FAILURE, "", json.dumps(self))))
            store.set(_STATUS_REQUEST, "")
            return first
        except RuntimeError:  # the store is gone
            return self

    def describe(self) -> str:
        """Return the text for a log."""
        return f"Rank {self.rank} {self.how} first:\n{self.text}"

    @property
    def is_config_error(self) -> bool:
        """Whether the input is wrong."""
        return self.how.startswith("was refused")

    def config_error(self) -> ConfigError:
        """Return the error of the rank."""
        error = ConfigError(self.text)
        error.exit_code = 2 if self.how == "was refused" else 1
        return error


@contextlib.contextmanager
def ends_without_answer() -> Iterator[None]:
    """Write stacks and exit with code 1 if the body takes longer than 20 s: calls of a store behind a broken network
    never return."""
    faulthandler.dump_traceback_later(_NO_ANSWER, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# ---------------------------------------------------------------------- the status of the ranks


def write_status(store: "dist.Store", rank: int, state: str, text: str = "") -> None:
    """Write the status of a rank to the store. Later calls for the same rank are ignored.

    Args:
        store: the store.
        rank: the rank.
        state: "works", "fails" or "left".
        text: the stack of a rank that works; how a rank left.
    """
    with contextlib.suppress(RuntimeError):  # the store is gone
        store.compare_set(_status_key(rank), "", json.dumps([state, text]))


def _status_key(rank: int) -> str:
    return f"hookline/status/{rank}"


def read_statuses(store: "dist.Store", ranks: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Return the status of each rank that has written one: state and text of :func:`write_status`."""
    there = [rank for rank in ranks if store.check([_status_key(rank)])]
    return {rank: json.loads(store.get(_status_key(rank))) for rank in there}


def shown_stack(lines: Sequence[str]) -> str:
    """Return the innermost lines of a stack trace."""
    return "".join(lines[-12:]).rstrip()


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
    if isinstance(error, ConfigError):
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return Failure(rank, "was refused" if error.exit_code == 2 else "was refused in training", text)
    own = Failure(rank, "failed", "".join(traceback.format_exception(error)).rstrip())
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
    store.set(_STATUS_REQUEST, "")
    end = time.monotonic() + _ANSWER
    keys = [_status_key(rank) for rank in range(world_size)]
    while Failure.first(store) is None and not store.check(keys) and time.monotonic() < end:
        time.sleep(0.02)
    if first := Failure.first(store):
        return first
    answers = read_statuses(store, range(world_size))
    waited = f"Rank {own.rank} waited for it here:\n{shown_stack(traceback.format_tb(error.__traceback__))}"
    for rank in range(world_size):
        state, text = answers.get(rank, ("left", "it does not answer: its process ended or is blocked"))
        if state == "left":
            return Failure(rank, "left", f"{text}. {waited}")
    if not isinstance(error, comm.BarrierTimeoutError) and not re.search("time(d )?out", str(error), re.IGNORECASE):
        return own
    here = traceback.extract_tb(error.__traceback__)[-1]
    stacks = {rank: stack for rank, (state, stack) in answers.items() if state == "works" and rank != own.rank}
    for rank, stack in stacks.items():
        if not waits(stack, here):
            return Failure(rank, "hung", f"others waited {seconds:g} s for it while it was here:\n{stack}\n{waited}")
    # All ranks wait, in collectives that do not match.
    texts = [f"Rank {rank} was here:\n{stack}" for rank, stack in stacks.items()]
    return own._replace(text="\n".join([own.text, *texts]))
