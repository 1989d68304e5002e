"""A process of several: joins the other ranks, runs a function, and leaves.

A thread of each rank checks twice a second whether another rank has failed. A rank that is still running a few seconds
after a failure writes its stack traces and exits.
"""

import contextlib
import faulthandler
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import IO, Any

import torch
import torch.distributed as dist

from ...config import ConfigError
from .. import comm
from .failures import (
    CLEAN_EXIT_CODES,
    LOG_FILE,
    Failure,
    ends_without_answer,
    failure_behind,
    shown_stack,
    status_is_requested,
    write_status,
)

__all__ = ["DUMP_SIGNAL", "Place", "run_rank", "set_log_file", "uses_gpus", "watch_parent"]

logger = logging.getLogger(__name__)

_LOOK_EVERY = 0.5
# Seconds until a rank is ended after another one failed or was interrupted. An interruption usually reaches all ranks,
# which then write their metrics.
_GRACE, _GRACE_INTERRUPTED = 4.0, 20.0
# Seconds that a rank that is done waits for the others before its process ends.
_LEAVE = 5.0

# A process that gets this signal writes its stack traces to standard error, even if its interpreter is blocked.
# By default SIGURG is ignored, so it does not harm a process that does not handle it yet.
DUMP_SIGNAL = signal.SIGURG
# The store of the run that this process has joined.
_run_store: "dist.Store | None" = None


@dataclass(frozen=True)
class Place:
    """The place of a process among all ranks.

    Attributes:
        rank, world_size: rank and number of processes, over all machines.
        local_rank, local_size: the same on this machine.
        cuda: whether it uses the GPU of its local rank.
        timeout: how long a collective waits for the others.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    cuda: bool
    timeout: timedelta


def uses_gpus(device: str) -> bool:
    """Whether each of several ranks has a GPU.

    Args:
        device: ``MODEL.DEVICE``.

    Raises:
        ConfigError: the device works in a single process only.
    """
    if device.startswith("mps"):
        raise ConfigError("MODEL.DEVICE: mps works in one process only; use --num-gpus 1, or the device cpu")
    if device.startswith("cuda:"):
        raise ConfigError(f"MODEL.DEVICE: each process has its own GPU; use cuda instead of {device}")
    return device in ("auto", "cuda") and torch.cuda.is_available()


def set_log_file(path: str) -> None:
    """Pass the path of the run's log to the launcher, which writes the first failure there."""
    if _run_store is not None and comm.is_main_process():
        _run_store.set(LOG_FILE, os.path.abspath(path))


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
        store: where the ranks meet. The launcher keeps it.
        place: the place of this process.
        greet: called repeatedly until all ranks are there.

    Returns:
        What ``main_func`` returns.

    Raises:
        Exception: what ``main_func`` raises, after it was reported to the other ranks.
    """
    global _run_store
    _run_store = store
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
    if place.cuda:
        torch.cuda.set_device(place.local_rank)
    stop = threading.Event()
    # The thread needs its own connection: a connection that one thread waits on is blocked for the others.
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
        if not _leave(store, place, code, text) and code not in CLEAN_EXIT_CODES:
            Failure(place.rank, "left", text, code).report(store)
        raise
    except KeyboardInterrupt as error:
        write_status(store, place.rank, "fails")
        Failure.of(error, place.rank).report(store)
        raise
    except BaseException as error:
        seconds = place.timeout.total_seconds()
        # torchrun sends SIGTERM at once, and waits 30 s.
        with _sigterm_ignored(), ends_without_answer(f"rank {place.rank}"):
            write_status(store, place.rank, "fails")
            first = failure_behind(error, store, place.rank, place.world_size, seconds).report(store)
        if first.rank != place.rank and first.kind != "config":
            # The first failure is the last entry of the log, after the errors that follow from it.
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


# ---------------------------------------------------------------------- joining and leaving


def _meet(store: "dist.Store", place: Place, greet: Callable[[], None]) -> None:
    """Wait until all ranks are there.

    Raises:
        ConfigError: ranks are missing after the timeout, or machines have different numbers of processes.
    """
    keys = [f"hookline/here/{rank}" for rank in range(place.world_size)]
    mine = json.dumps([place.world_size, place.local_size, platform.node(), os.getpid()])
    there = store.compare_set(keys[place.rank], "", mine).decode()
    _compare_sizes(place, there)
    if there != mine:
        node = json.loads(there)[2]
        raise ConfigError(f"rank {place.rank} is there already, on {node}: give each machine its own --machine-rank")
    end, pause = time.monotonic() + place.timeout.total_seconds(), 0.001
    while True:
        greet()
        if store.check(keys[:1]):
            _compare_sizes(place, store.get(keys[0]).decode())
        if store.check(keys):
            return
        if failure := Failure.first(store):
            raise ConfigError(failure.text) if failure.kind == "config" else RuntimeError(failure.describe())
        if time.monotonic() > end:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise ConfigError(
                f"rank(s) {', '.join(missing)} did not join within {place.timeout.total_seconds():g} s "
                "(PARALLEL.TIMEOUT): start all machines, with the same number of processes on each"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _compare_sizes(place: Place, other: str) -> None:
    world_size, local_size, node, _ = json.loads(other)
    if world_size != place.world_size:
        raise ConfigError(
            f"{platform.node()} expects {place.world_size} processes, {place.local_size} of them its own; "
            f"{node} expects {world_size}, {local_size} of them its own. "
            "Start all machines with the same --num-machines and --num-gpus"
        )


def _leave(store: "dist.Store", place: Place, code: int, how: str) -> bool:
    """Wait a few seconds until the other ranks are done; returns whether they are.

    A process that ends closes its connections. A rank that waits for it in a collective then fails at once.
    """
    write_status(store, place.rank, "left", how, code)
    seconds = _LEAVE
    if code in CLEAN_EXIT_CODES and code and dist.is_torchelastic_launched():
        # To torchrun, each exit code but 0 is a failure: it would end the others, which may be writing checkpoints.
        seconds = place.timeout.total_seconds()
    try:
        comm.barrier("leave", seconds)
    except (TimeoutError, RuntimeError):  # the store is gone once the slowest rank has come
        return False
    return True


@contextlib.contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM in a rank that is ending."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


# ---------------------------------------------------------------------- threads that watch


def _watch(store: "dist.Store", rank: int, stop: threading.Event) -> None:
    """Write the status of this rank when it is requested; end the process some time after another rank failed."""
    answered = False
    while not stop.wait(_LOOK_EVERY):
        try:
            if not status_is_requested(store):
                continue
        except RuntimeError:  # the launcher was killed; watch_parent() notices that
            return
        if not answered:
            write_status(store, rank, "works", _main_stack())
            answered = True
        failure = Failure.first(store)
        if failure is None:
            continue
        if stop.wait(_GRACE_INTERRUPTED if failure.kind == "interrupted" else _GRACE):
            return
        with _log_stream() as stream:
            stream.write(
                f"rank {rank} is ended: rank {failure.rank} {failure.how}, and this one did not end by itself; "
                f"stacks of its threads:\n"
            )
            stream.flush()
            faulthandler.dump_traceback(file=stream, all_threads=True)
        os._exit(1)


def _main_stack() -> str:
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    return shown_stack(traceback.format_stack(frame)) if frame is not None else ""


@contextlib.contextmanager
def _log_stream() -> Iterator[IO[str]]:
    """Open this rank's log file, or use standard error."""
    paths = [getattr(handler, "log_path", None) for handler in logging.getLogger("hookline").handlers]
    path = next((path for path in paths if path), None)
    if path is None:
        yield sys.stderr
        return
    with open(path, "a", encoding="utf-8") as file:
        yield file


def watch_parent(grace: float = 60.0) -> None:
    """Send SIGTERM to this process when the process that started it is killed; end it some time after."""
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="hookline-parent").start()
