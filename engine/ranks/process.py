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
import uuid
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ...config import ConfigError
from .. import comm
from .environment import uses_gpus
from .failures import (
    CLEAN_EXIT_CODES,
    STATUS_REQUEST,
    Failure,
    ends_without_answer,
    failure_behind,
    shown_stack,
    write_status,
)

__all__ = ["DUMP_SIGNAL", "join_torchrun", "run_rank", "watch_parent"]

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


def run_rank(
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
    store: "dist.Store",
    timeout: timedelta,
    cuda: bool,
    greet: Callable[[], None] = lambda: None,
) -> Any:
    """Join the other ranks, run ``main_func(*args)``, and leave when all are done.

    The environment has the place of this process among them: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE.

    Args:
        main_func: the function.
        args: its arguments.
        store: where the ranks meet. The launcher keeps it.
        timeout: how long a collective waits for the others.
        cuda: whether it uses the GPU of its local rank.
        greet: called repeatedly until all ranks are there.

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
        _meet(store, rank, world_size, timeout.total_seconds(), greet)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        result = main_func(*args)
        all_done = _leave(store, rank, timeout, 0, "its function returned")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        where = "".join(traceback.format_tb(end.__traceback__)[-1:]).strip()
        text = f"it ended by SystemExit({end.code!r}):\n  {where}"
        if not _leave(store, rank, timeout, code, text) and code not in CLEAN_EXIT_CODES:
            Failure(rank, "left", text, code).report(store)
        raise
    except KeyboardInterrupt as error:
        write_status(store, rank, "fails")
        Failure.of(error, rank).report(store)
        raise
    except BaseException as error:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it at once, and waits 30 s
        with ends_without_answer(f"rank {rank}"):
            write_status(store, rank, "fails")
            first = failure_behind(error, store, rank, world_size, timeout.total_seconds()).report(store)
        if first.rank != rank and first.kind != "config":
            # The first failure is the last entry of the log, after the errors that follow from it.
            logger.error("%s", first.describe())
            error.add_note(first.describe())  # torchrun shows the error of a rank
        elif first.kind == "exception" and not getattr(error, "logged_by_trainer", False):
            logger.error("Rank %d fails", rank, exc_info=error)
        raise
    finally:
        stop.set()
    if all_done:
        dist.destroy_process_group()
    return result


# ---------------------------------------------------------------------- joining and leaving


def _meet(store: "dist.Store", rank: int, world_size: int, seconds: float, greet: Callable[[], None]) -> None:
    """Wait until all ranks are there.

    Raises:
        ConfigError: ranks are missing after the timeout, or machines have different numbers of processes.
    """
    keys = [f"hookline/here/{number}" for number in range(world_size)]
    mine = json.dumps([world_size, os.environ.get("LOCAL_WORLD_SIZE"), platform.node(), os.getpid()])
    _compare_sizes(mine, store.compare_set("hookline/sizes", "", mine).decode())
    there = store.compare_set(keys[rank], "", mine).decode()
    if there != mine:
        node = json.loads(there)[2]
        raise ConfigError(f"rank {rank} is there already, on {node}: give each machine its own --machine-rank")
    end, pause = time.monotonic() + seconds, 0.001
    while True:
        greet()
        if store.check(keys):
            return
        if failure := Failure.first(store):
            raise ConfigError(failure.text) if failure.kind == "config" else RuntimeError(failure.describe())
        if time.monotonic() > end:
            missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
            raise ConfigError(
                f"rank(s) {', '.join(missing)} did not join within {seconds:g} s "
                "(PARALLEL.TIMEOUT): start all machines, with the same number of processes on each"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _compare_sizes(mine: str, first: str) -> None:
    """Compare the number of processes with that of the rank that was there first."""
    here, there = json.loads(mine), json.loads(first)
    if here[0] != there[0]:
        raise ConfigError(
            f"{here[2]} expects {here[0]} processes, {here[1]} of them its own; {there[2]} expects {there[0]}, "
            f"{there[1]} of them its own. Start all machines with the same --num-machines and --num-gpus"
        )


def _leave(store: "dist.Store", rank: int, timeout: timedelta, code: int, how: str) -> bool:
    """Wait a few seconds until the other ranks are done; returns whether they are.

    A process that ends closes its connections. A rank that waits for it in a collective then fails at once.
    """
    write_status(store, rank, "left", how, code)
    # To torchrun, each exit code but 0 is a failure: it would end the others, which may be writing checkpoints.
    patient = code in CLEAN_EXIT_CODES and code and dist.is_torchelastic_launched()
    try:
        comm.barrier("leave", timeout.total_seconds() if patient else _LEAVE)
    except (TimeoutError, RuntimeError):  # the store is gone once the slowest rank has come
        return False
    return True


# ---------------------------------------------------------------------- torchrun


def join_torchrun(
    main_func: Callable[..., Any], args: tuple[Any, ...], processes: int, timeout: timedelta, device: str
) -> Any:
    """Run ``main_func(*args)`` in this process, as one of torchrun's ranks.

    Args:
        main_func, args: the function and its arguments.
        processes: the number of processes on this machine that the user asked for; 1 if they left it to torchrun.
        timeout: how long a rank waits for the others.
        device: ``MODEL.DEVICE``.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ.setdefault("LOCAL_WORLD_SIZE", "1"))
    if processes not in (1, local_size):
        raise ConfigError(f"--num-gpus {processes}: torchrun started {local_size} process(es) here; leave it out")
    if dist.is_torchelastic_launched():
        watch_parent(os.getppid())
    if world_size == 1:
        return main_func(*args)
    cuda = uses_gpus(device, local_size, "torchrun --nproc-per-node")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun's agent keeps the store, or else rank 0.
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        whole = dist.TCPStore(address, port, is_master=keeps, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        seconds = f"{timeout.total_seconds():g} s (PARALLEL.TIMEOUT)"
        raise ConfigError(
            f"rank {rank} found no store at {address}:{port} within {seconds} ({str(error).splitlines()[0]})"
        ) from None
    store, greet = _join_start(whole, rank, world_size)

    from torch.distributed.elastic.multiprocessing.errors import record  # slow to import

    @record  # passes an error to torchrun, which shows the earliest one when all ranks have ended
    def run() -> Any:
        try:
            return run_rank(main_func, args, store, timeout, cuda, greet)
        except ConfigError as error:
            first = Failure.first(store)
            if first is None or first.rank == rank:  # all ranks have the same message
                sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None

    return run()


def _join_start(store: dist.TCPStore, rank: int, world_size: int) -> tuple[dist.Store, Callable[[], None]]:
    """Find the part of the store that belongs to this start of the ranks.

    The agent's store also holds the keys of earlier starts, and the environment does not number the starts. So each
    process writes a random id, and rank 0 answers each id with its own id, which names the part.

    Returns:
        That part, and a function that rank 0 calls repeatedly until all ranks are there, to answer them.
    """
    mine, answered = uuid.uuid4().hex, dict[int, bytes]()
    part = dist.PrefixStore(f"hookline/{mine}", store)

    def greet() -> None:
        for other in range(1, world_size):
            if store.check([f"hookline/id/{other}"]):
                found = store.get(f"hookline/id/{other}")
                if answered.get(other) != found:
                    store.set(f"hookline/answer/{found.decode()}", mine)
                    answered[other] = found

    if rank == 0:
        return part, greet
    store.set(f"hookline/id/{rank}", mine)
    try:
        first = store.get(f"hookline/answer/{mine}").decode()
    except RuntimeError:
        seconds = f"{store.timeout.total_seconds():g} s (PARALLEL.TIMEOUT)"  # type: ignore[attr-defined]
        raise ConfigError(f"rank {rank} waited {seconds} for rank 0: start all machines") from None
    return dist.PrefixStore(f"hookline/{first}", store), lambda: None


# ---------------------------------------------------------------------- threads that watch


def _watch(store: "dist.Store", rank: int, stop: threading.Event) -> None:
    """Write the status of this rank when it is requested; end the process some time after another rank failed."""
    answered = False
    while not stop.wait(_LOOK_EVERY):
        try:
            if not store.check([STATUS_REQUEST]):
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
        sys.stderr.write(
            f"rank {rank} is ended: rank {failure.rank} {failure.how}, and this one did not end by itself; "
            f"stacks of its threads:\n"
        )
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


def _main_stack() -> str:
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    return shown_stack(traceback.format_stack(frame)) if frame is not None else ""


def watch_parent(parent: int, grace: float = 60.0) -> None:
    """Send SIGTERM to this process when the process that started it is killed; end it some time after.

    Args:
        parent: the number of that process.
        grace: seconds until this process is ended.
    """

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="hookline-parent").start()
