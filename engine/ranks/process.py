"""One process of several: how it joins the other ranks, leaves them, and reports that it failed.

The ranks meet in a key-value store that the launcher (``launch`` or torchrun) keeps, so it outlives them. The first
rank that fails writes its failure there. A thread of each rank looks there twice a second. A rank that is still at
work a few seconds after a failure logs its stack traces and exits.

A collective that times out or loses its connection fails on a healthy rank. That rank asks the others where they
stand; a rank that is gone, has left early or hangs is then the one that failed first.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import IO, Any

import torch
import torch.distributed as dist

from ...config import ConfigError
from .. import comm

__all__ = [
    "DUMP_SIGNAL",
    "GOOD_ORDER",
    "Failure",
    "Place",
    "environment",
    "has_left",
    "hung_ranks",
    "log_file",
    "run_rank",
    "tell_log_file",
    "watch_agent",
    "watch_parent",
]

logger = logging.getLogger(__name__)

GOOD_ORDER = (0, 75, 130)
"""Exit codes that all ranks agreed on: done, stopped to be resumed (EX_TEMPFAIL), interrupted."""

_FAILURE, _LOG_FILE = "hookline/failure", "hookline/log_file"
# Set by a rank that wants to know where the others stand.
_CALL = "hookline/call"
_LOOK_EVERY = 0.5
# Seconds in which a rank answers a call. One that does not is gone.
_ANSWER = 3.0
# Seconds that a rank has to end by itself after another one failed; or was interrupted, as most likely it is too,
# and may be writing its metrics.
_GRACE, _GRACE_INTERRUPTED = 4.0, 20.0
# Seconds that a rank which is done waits for the others before its process ends.
_LEAVE = 5.0
# How many lines of a stack trace an error message shows.
_FRAMES = 12

# A process that gets it writes its stack traces to standard error, even if its interpreter is blocked.
# By default SIGURG is ignored, so a process that does not handle it yet is not harmed.
DUMP_SIGNAL = signal.SIGURG
# The store of the run that this process has joined.
_run_store: "dist.Store | None" = None


@dataclass(frozen=True)
class Place:
    """Where a process stands among all of them.

    Attributes:
        rank, world_size: its number, and that of processes, over all machines.
        local_rank, local_size: the same on this machine.
        cuda: whether it has the GPU of its local rank.
        timeout: how long a collective waits for the others.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    cuda: bool
    timeout: timedelta


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: its number.
        kind: "config" for bad input, whose message is all there is to say; "interrupted" by KeyboardInterrupt;
            "exception"; "killed" by a signal; "left" before the others were done; "hung".
        text: the message, or the traceback.
        code: the exit code of a rank that left, if it is known.
    """

    rank: int
    kind: str
    text: str
    code: int | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failure":
        """From an exception that ends a rank."""
        if isinstance(error, ConfigError):
            return cls(rank, "config", str(error))
        kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "exception"
        return cls(rank, kind, "".join(traceback.format_exception(error)).rstrip())

    def tell(self, store: "dist.Store") -> "Failure":
        """Write it to the store unless another rank was faster; returns the first failure, which the store has then."""
        try:
            mine = json.dumps([self.rank, self.kind, self.text, self.code])
            first = Failure(*json.loads(store.compare_set(_FAILURE, "", mine)))
            store.set(_CALL, "")
            return first
        except RuntimeError:  # the store is gone, and the launcher with it
            return self

    @classmethod
    def first(cls, store: "dist.Store") -> "Failure | None":
        """The first failure, if there was one.

        Raises:
            RuntimeError: the store is gone.
        """
        return cls(*json.loads(store.get(_FAILURE))) if store.check([_FAILURE]) else None

    def describe(self) -> str:
        """For a log, in one piece."""
        return f"Rank {self.rank} {self.how} first:\n{self.text}"

    @property
    def how(self) -> str:
        """In words: it "failed", for example."""
        return {"interrupted": "was interrupted", "left": "left", "hung": "hung"}.get(self.kind, "failed")


def tell_log_file(path: str) -> None:
    """Tell the launcher the path of the run's log, so that it can write there which rank failed first."""
    if _run_store is not None and comm.is_main_process():
        _run_store.set(_LOG_FILE, os.path.abspath(path))


def log_file(store: "dist.Store") -> str:
    """The path that was passed to :func:`tell_log_file`; empty if it was not called."""
    try:
        return store.get(_LOG_FILE).decode() if store.check([_LOG_FILE]) else ""
    except RuntimeError:
        return ""


def run_rank(
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
    store: "dist.Store",
    place: Place,
    greet: Callable[[], None] = lambda: None,
) -> Any:
    """Join the other ranks, run ``main_func(*args)``, and leave when all are done.

    Args:
        main_func: the function.
        args: its arguments.
        store: where the ranks meet; kept by somebody who outlives them.
        place: of this process.
        greet: is called again and again while the other ranks come.

    Returns:
        What ``main_func`` returns.

    Raises:
        Exception: what it raises; the other ranks know it then.
    """
    global _run_store
    _run_store = store
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
    if place.cuda:
        torch.cuda.set_device(place.local_rank)
    stop = threading.Event()
    # A separate connection: one that a thread waits on is blocked for all others.
    own: dist.Store = store.clone()  # type: ignore[attr-defined]
    threading.Thread(target=_watch, args=(own, place.rank, stop), daemon=True, name="hookline-watch").start()
    try:
        _meet(store, place, greet)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if place.cuda else "gloo",
            store=dist.PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=place.timeout,
        )
        result = main_func(*args)
        all_done = _leave(store, place, 0, "its function returned")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        where = "".join(traceback.format_tb(end.__traceback__)[-1:]).strip()
        text = f"it ended by SystemExit({end.code!r}):\n  {where}"
        if not _leave(store, place, code, text) and code not in GOOD_ORDER:
            Failure(place.rank, "left", text, code).tell(store)
        raise
    except KeyboardInterrupt as error:
        _stand(store, place.rank, "fails")
        Failure.of(error, place.rank).tell(store)  # what the others fail with, if they are not interrupted too
        raise
    except BaseException as error:
        _stand(store, place.rank, "fails")
        with _sigterm_ignored():  # torchrun sends it at once, and waits 30 s
            first = _failure_behind(error, store, place).tell(store)
        if first.rank != place.rank and first.kind != "config":
            # The first failure comes last in the log, below what follows from it.
            logger.error("%s", first.describe())
            error.add_note(first.describe())  # torchrun shows the error of a rank
        elif first.kind == "exception" and not getattr(error, "logged_by_trainer", False):
            logger.error("Rank %d fails", place.rank, exc_info=error)
        raise
    finally:
        stop.set()
    if all_done:
        dist.destroy_process_group()
    return result


# ---------------------------------------------------------------------- coming and going


def _meet(store: "dist.Store", place: Place, greet: Callable[[], None]) -> None:
    """Wait until all ranks are here.

    Raises:
        ConfigError: some did not come in time, or machines were started with different numbers of processes.
    """
    keys = [f"hookline/here/{rank}" for rank in range(place.world_size)]
    mine = json.dumps([place.world_size, place.local_size, platform.node(), os.getpid()])
    there = store.compare_set(keys[place.rank], "", mine).decode()
    _compare_sizes(place, there)
    if there != mine:
        node = json.loads(there)[2]
        raise ConfigError(f"rank {place.rank} is there already, on {node}: give each machine its own --machine-rank")
    end, pause = time.monotonic() + place.timeout.total_seconds(), 0.001
    while not store.check(keys):
        greet()
        if store.check(keys[:1]):
            _compare_sizes(place, store.get(keys[0]).decode())
        if failure := Failure.first(store):
            raise ConfigError(failure.text) if failure.kind == "config" else RuntimeError(failure.describe())
        if time.monotonic() > end:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise ConfigError(
                f"{_ranks_in_words(missing)} did not come within {place.timeout.total_seconds():g} s "
                "(PARALLEL.TIMEOUT): start all machines, with the same number of processes on each"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    _compare_sizes(place, store.get(keys[0]).decode())


def _compare_sizes(place: Place, other: str) -> None:
    world_size, local_size, node, _ = json.loads(other)
    if world_size != place.world_size:
        raise ConfigError(
            f"{platform.node()} counts {place.world_size} processes in all, {place.local_size} of them its own; "
            f"{node} counts {world_size} and {local_size}. "
            "Start all machines with the same --num-machines and --num-gpus"
        )


def _ranks_in_words(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _leave(store: "dist.Store", place: Place, code: int, how: str) -> bool:
    """Wait some time for the others to be done; returns whether they are.

    A process that ends closes its connections. A rank that waits for this one in a collective then fails at once.
    """
    _stand(store, place.rank, "left", how, code)
    seconds = _LEAVE
    if code in GOOD_ORDER and code and dist.is_torchelastic_launched():
        # torchrun would end the others, which may be writing checkpoints: to torchrun each code but 0 is a failure.
        seconds = place.timeout.total_seconds()
    try:
        comm.barrier("leave", seconds)
    except (TimeoutError, RuntimeError):  # the store is gone once the slowest has come
        return False
    return True


# ---------------------------------------------------------------------- where the ranks stand


def _stand(store: "dist.Store", rank: int, state: str, text: str = "", code: int = 0) -> None:
    """Write to the store what a rank does: "works", with its stack, "fails" or has "left". The first time counts."""
    with contextlib.suppress(RuntimeError):  # the store is gone
        store.compare_set(_stand_key(rank), "", json.dumps([state, text, code]))


def _stand_key(rank: int) -> str:
    return f"hookline/stands/{rank}"


def has_left(store: "dist.Store", rank: int) -> bool:
    """Whether a rank whose process has ended wrote to the store why. If not, it ended by ``os._exit``, for example."""
    if store.check([_FAILURE]):
        return True
    return store.check([_stand_key(rank)]) and json.loads(store.get(_stand_key(rank)))[0] != "works"


def hung_ranks(store: "dist.Store", world_size: int) -> dict[int, str]:
    """The stacks of the ranks that worked on when another one had failed, and did not wait in a collective."""
    found = {}
    for rank in range(world_size):
        if store.check([_stand_key(rank)]):
            state, stack, _ = json.loads(store.get(_stand_key(rank)))
            if state == "works" and not _waits(stack):
                found[rank] = stack
    return found


def _failure_behind(error: BaseException, store: "dist.Store", place: Place) -> Failure:
    """The failure of another rank that made a collective of this one fail, or else this rank's own."""
    own = Failure.of(error, place.rank)
    collective = _collective_error(error)
    if collective is None:
        return own
    try:
        return _ask_the_others(collective, own, store, place)
    except RuntimeError:  # the store is gone
        return own


@contextlib.contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """For a rank that is ending already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _collective_error(error: BaseException | None) -> BaseException | None:
    """The error of a collective among an exception and its causes: it timed out, or a connection was lost."""
    while error is not None:
        from_torch = isinstance(error, RuntimeError) and ("gloo/" in str(error) or "NCCL" in str(error))
        if from_torch or isinstance(error, dist.DistError | comm.BarrierTimeoutError):
            return error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _ask_the_others(error: BaseException, own: Failure, store: "dist.Store", place: Place) -> Failure:
    others = [rank for rank in range(place.world_size) if rank != place.rank]
    store.set(_CALL, "")
    end = time.monotonic() + _ANSWER
    while not store.check([_stand_key(rank) for rank in others]) and time.monotonic() < end:
        if store.check([_FAILURE]):
            break
        time.sleep(0.02)
    if first := Failure.first(store):
        return first
    waited = f"Rank {place.rank} waited for it here:\n{_shown_stack(traceback.format_tb(error.__traceback__))}"
    answers = {rank: json.loads(store.get(_stand_key(rank))) for rank in others if store.check([_stand_key(rank)])}
    for rank in others:
        if rank not in answers:
            return Failure(rank, "left", f"it does not answer: its process ended or is blocked. {waited}")
        state, text, code = answers[rank]
        if state == "left":
            return Failure(rank, "left", f"{text}\nexit code {code}. {waited}", code)
    if not isinstance(error, comm.BarrierTimeoutError) and not re.search("time(d )?out", str(error), re.IGNORECASE):
        return own
    here = traceback.extract_tb(error.__traceback__)[-1]
    for rank, (state, stack, _) in answers.items():
        if state == "works" and not _waits(stack, here):
            limit = f"{place.timeout.total_seconds():g} s"
            return Failure(rank, "hung", f"it stands here, and others waited {limit} for it:\n{stack}\n{waited}")
    # They all wait, in collectives that do not match.
    stands = [f"Rank {rank} stands here:\n{stack}" for rank, (state, stack, _) in answers.items() if state == "works"]
    return Failure(place.rank, "exception", "\n".join([own.text, *stands]))


def _waits(stack: str, here: traceback.FrameSummary | None = None) -> bool:
    """Whether a rank with this stack waits in a collective, as far as its innermost line tells.

    Args:
        stack: of the rank.
        here: where another rank waited; the same line is a collective.
    """
    innermost = [line for line in stack.splitlines() if line.lstrip().startswith("File ")][-1]
    places = [os.path.join("torch", "distributed", ""), comm.__file__]
    if here is not None:
        places.append(f'"{here.filename}", line {here.lineno},')
    return any(place in innermost for place in places)


def _shown_stack(lines: Sequence[str]) -> str:
    return "".join(lines[-_FRAMES:]).rstrip()


def _watch(store: "dist.Store", rank: int, stop: threading.Event) -> None:
    """On a thread of its own: answer where this rank stands; end it if another one failed and it does not end."""
    asked = False
    while not stop.wait(_LOOK_EVERY):
        try:
            if not asked:
                if not store.check([_CALL]):
                    continue
                asked = True
                _stand(store, rank, "works", _main_stack())
            failure = Failure.first(store)
        except RuntimeError:  # the launcher was killed: each rank gets a signal then
            return
        if failure is None:
            continue
        if stop.wait(_GRACE_INTERRUPTED if failure.kind == "interrupted" else _GRACE):
            return
        with _log_stream() as stream:
            stream.write(
                f"rank {rank} is ended, since rank {failure.rank} {failure.how} and it did not end by itself; "
                f"its threads stand here:\n"
            )
            stream.flush()
            faulthandler.dump_traceback(file=stream, all_threads=True)
        os._exit(1)


def _main_stack() -> str:
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    return _shown_stack(traceback.format_stack(frame)) if frame is not None else ""


@contextlib.contextmanager
def _log_stream() -> Iterator[IO[str]]:
    """This rank's log file, or else standard error."""
    paths = [getattr(handler, "log_path", None) for handler in logging.getLogger("hookline").handlers]
    path = next((path for path in paths if path), None)
    if path is None:
        yield sys.stderr
        return
    with open(path, "a", encoding="utf-8") as file:
        yield file


def watch_parent(parent: Any, grace: float = 60.0) -> None:
    """End this process some time after its launcher was killed. It gets SIGTERM at once, to save and stop."""

    def wait() -> None:
        parent.join()
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="hookline-parent").start()


def watch_agent(grace: float = 60.0) -> None:
    """Stop this process as by SIGTERM when the torchrun agent that started it is killed; end it some time after."""
    agent = os.getppid()

    def wait() -> None:
        while os.getppid() == agent:
            time.sleep(_LOOK_EVERY)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="hookline-agent").start()


def environment(place: Place, address: str, port: int) -> Mapping[str, str]:
    """The variables that torchrun sets, for libraries that look at them."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
