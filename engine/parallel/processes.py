"""Starts the ranks of this machine, and is what each rank runs: it joins the others, calls a function and leaves.

The ranks share a key-value store. The launcher (``launch`` or torchrun) keeps it, so it outlives the ranks. The first
failure is written there once: by the rank that raises an error, or by ``launch`` for a process that was killed or has
exited. A thread of each rank looks for it twice a second. A rank that is still running a few seconds later writes its
stack traces and exits; ``launch`` kills one that cannot.
"""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import pickle
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from ...command_line import handling_signals
from ...config import ConfigError
from ...hooks.builtin.interruption import EXIT_INTERRUPTED, EXIT_RESUMABLE
from .. import comm

logger = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds after the first failure until the launcher kills the remaining ranks. Most end earlier by themselves."""

# New interpreters: a fork would copy locks that threads hold, and could not use CUDA if this process has.
_METHOD: Final = "spawn"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Exit codes that are not failures: done, stopped to be resumed, interrupted.
_CLEAN = (0, EXIT_RESUMABLE, EXIT_INTERRUPTED)

# Keys of the store.
_FAILURE = "hookline/failure"
_RESULT = "hookline/result"
_LEFT = "hookline/left"

# Seconds between two looks at the processes, and at the store.
_JOIN_EVERY = 0.05
_LOOK_EVERY = 0.5
# Seconds until a rank ends itself after another one failed, with its stacks.
_END_AFTER = 2.5
# Seconds that a rank that is done waits for the others before its process ends.
_LEAVE = 5.0
# Seconds in which the failure behind a lost connection is written.
_CAUSE = 2.0
# Seconds for an exchange with the store.
_NO_ANSWER = 20.0


# ---------------------------------------------------------------------- the launcher of a machine


def run_local_ranks(
    main_func: Callable[..., Any],
    args: tuple[object, ...],
    store: dist.TCPStore,
    address: str,
    ranks: range,
    world_size: int,
    timeout: timedelta,
    cuda: bool,
) -> Any:
    """Run ``main_func(*args)`` in the ranks of this machine.

    Args:
        main_func, args: the function and its arguments.
        store: the store in which all ranks meet.
        address: its host.
        ranks: the ranks of this machine.
        world_size: the number of ranks on all machines.
        timeout: how long a collective waits for the others.
        cuda: whether each rank has a GPU.

    Returns:
        What the function returned in the first of these ranks; None if that cannot be pickled.

    Raises:
        Exception: see :func:`~hookline.engine.launch`.
    """
    spawn, method = multiprocessing.get_context(_METHOD), multiprocessing.get_start_method(allow_none=True)
    common = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": len(ranks), "MASTER_ADDR": address}  # as torchrun does
    processes: dict[int, BaseProcess] = {}
    for local_rank, rank in enumerate(ranks):
        variables = {**common, "MASTER_PORT": store.port, "RANK": rank, "LOCAL_RANK": local_rank}
        what = ({name: str(value) for name, value in variables.items()}, method, main_func, args, timeout, cuda)
        processes[rank] = spawn.Process(target=_child, args=what)
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for process in processes.values():
            if process.is_alive():
                os.kill(process.pid, number)  # type: ignore[arg-type]

    with handling_signals(**{number.name: forward for number in _SIGNALS}):
        _start(processes.values())
        failure = _join(processes, store, received)
    if failure is not None:
        raise failure
    if code := max(process.exitcode or 0 for process in processes.values()):
        raise SystemExit(code)
    with contextlib.suppress(RuntimeError), ends_without_answer():  # machine 0 has ended, and the store with it
        key = f"{_RESULT}/{ranks[0]}"
        return pickle.loads(store.get(key)) if store.check([key]) else None


def _start(processes: Iterable[BaseProcess]) -> None:
    """Start processes. A signal waits until all are there, and in each of them until :func:`_child` can handle it."""
    resource_tracker.ensure_running()  # starting it later, with the first process, would unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        for process in processes:
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _join(processes: dict[int, BaseProcess], store: dist.Store, received: Collection[int]) -> BaseException | None:
    """Wait until all processes have ended. After a failure, kill those that are left some seconds later.

    Args:
        processes: by rank.
        store: where the first failure is written.
        received: the signals that were passed on to the processes.

    Returns:
        The first failure, if there is one.
    """
    failure, end = None, 0.0
    while failure is None or time.monotonic() < end:
        codes = {rank: process.exitcode for rank, process in processes.items()}
        failed = [rank for rank, code in codes.items() if code is not None and code not in _CLEAN]
        if failed and failure is None:
            end = time.monotonic() + GRACE
            failure = _failure(failed[0], processes[failed[0]], store, received)
        if None not in codes.values():
            break
        time.sleep(_JOIN_EVERY)
    for process in processes.values() if failure is not None else ():
        process.kill()
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()
    return failure


def _failure(rank: int, process: BaseProcess, store: dist.Store, received: Collection[int]) -> BaseException:
    """Return the first failure, after a process has failed."""
    code = process.exitcode or 0
    if -code in received:  # the process had no handler of the signal yet
        return SystemExit(EXIT_RESUMABLE if -code in (signal.SIGTERM, signal.SIGUSR1) else 128 - code)
    name = f" ({signal.Signals(-code).name})" if -code in set(signal.Signals) else ""
    error = _failed_first(rank, f"process {process.pid} ended with exit code {code}{name}")
    with ends_without_answer():
        return report(store, rank, error)[1]  # that of a rank that has raised an error, if there is one


def _child(
    variables: Mapping[str, str],
    method: str | None,
    main_func: Callable[..., Any],
    args: tuple[object, ...],
    timeout: timedelta,
    cuda: bool,
) -> None:
    """Run a rank. ``variables`` of the environment have its place, and ``method`` is the launcher's start method."""
    os.setpgrp()  # Ctrl-C reaches the launcher only, which passes it on once to all ranks
    watch_parent(multiprocessing.parent_process().pid)  # type: ignore[union-attr, arg-type]
    multiprocessing.set_start_method(method, force=True)  # on Linux, loader workers are forked, as under torchrun
    os.environ.update(variables)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(variables["LOCAL_WORLD_SIZE"])))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        store = dist.TCPStore(variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), is_master=False, timeout=timeout)
        try:
            value = run_rank(main_func, args, store, timeout, cuda)
        except Exception:
            sys.exit(1)  # the launcher raises it
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as end:
        sys.exit(end.code if isinstance(end.code, int | None) else 1)  # the launcher writes a message
    if variables["LOCAL_RANK"] == "0" and value is not None:
        with contextlib.suppress(Exception):  # pickling may raise anything
            store.set(f"{_RESULT}/{variables['RANK']}", pickle.dumps(value))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- a rank


def run_rank(
    main_func: Callable[..., Any], args: tuple[object, ...], store: dist.TCPStore, timeout: timedelta, cuda: bool
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
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    stop = threading.Event()
    # The thread needs its own connection: a connection that one thread waits on is blocked for the others.
    connection: dist.Store = store.clone()  # type: ignore[attr-defined]
    threading.Thread(target=_watch, args=(connection, rank, stop), daemon=True, name="hookline-watch").start()
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
        if _leave(store, rank, world_size, _LEAVE) and dist.is_initialized():
            dist.destroy_process_group()
        return result
    except BaseException as error:
        if isinstance(error, SystemExit) and (error.code or 0) in _CLEAN:
            # To torchrun, each exit code but 0 is a failure: it would end the others, which may be saving.
            patient = error.code and dist.is_torchelastic_launched()
            _leave(store, rank, world_size, timeout.total_seconds() if patient else _LEAVE)
            raise
        stop.set()
        with ends_without_answer():
            first_rank, first = report(store, rank, _as_raised(error, rank, world_size, store))
        if isinstance(first, ProcessRaisedException):
            # The last entry of the log, after the errors that follow from it. The console gets it from the launcher.
            logger.debug("%s", first)
            if first_rank != rank:
                error.add_note(str(first))  # torchrun shows the error of a rank
        raise
    finally:
        stop.set()


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
    if missing := comm.missing_ranks(store, "hookline/here", rank, world_size, seconds):
        raise ConfigError(
            f"rank(s) {', '.join(missing)} did not join within {seconds:g} s "
            "(PARALLEL.TIMEOUT): start all machines, with the same number of processes on each"
        )


def _leave(store: dist.Store, rank: int, world_size: int, seconds: float) -> bool:
    """Wait some seconds until the other ranks are done; returns whether they are.

    A process that ends closes its connections. A rank that waits for it in a collective then fails at once.
    """
    try:
        return not comm.missing_ranks(store, _LEFT, rank, world_size, seconds)
    except RuntimeError:  # the store is gone: its rank or launcher has left
        return False


def _watch(store: dist.Store, rank: int, stop: threading.Event) -> None:
    """End this process some time after a rank failed, unless it has failed itself."""
    while (first := first_failure(store)) is None:
        if stop.wait(_LOOK_EVERY):
            return
    if stop.wait(_END_AFTER):
        return
    if isinstance(first[1], ProcessRaisedException):
        logger.debug("%s", first[1])
        print(f"rank {rank} is ended, since rank {first[0]} failed. Stacks of its threads:", file=sys.stderr)
        faulthandler.dump_traceback(file=2)
    os._exit(1)


def watch_parent(parent: int, grace: float = 60.0) -> None:
    """Send SIGTERM to this process when the process that started it is killed; end it some time after.

    Args:
        parent: the number of that process.
        grace: seconds until this process is ended.
    """

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            time.sleep(_LEAVE)  # training may have ended: another rank noticed it first, and all stop at one step
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=look, daemon=True, name="hookline-parent").start()


# ---------------------------------------------------------------------- failures


def first_failure(store: dist.Store) -> tuple[int, BaseException] | None:
    """Return the rank that failed first, and what :func:`~hookline.engine.launch` raises for it.

    None if no rank failed, or if the store is gone because the launcher has ended.
    """
    try:
        return pickle.loads(bytes.fromhex(store.get(_FAILURE).decode())) if store.check([_FAILURE]) else None
    except RuntimeError:
        return None


def report(store: dist.Store, rank: int, error: BaseException) -> tuple[int, BaseException]:
    """Write the failure of a rank to the store unless there is one already. Returns the first failure."""
    with contextlib.suppress(RuntimeError):  # the store is gone
        store.compare_set(_FAILURE, "", pickle.dumps((rank, error)).hex())
    return first_failure(store) or (rank, error)


def _failed_first(rank: int, text: str) -> ProcessRaisedException:
    return ProcessRaisedException(f"Rank {rank} failed first:\n{text}", rank, -1)


def _as_raised(error: BaseException, rank: int, world_size: int, store: dist.Store) -> BaseException:
    """Return what ``launch()`` raises for the error of a rank, without what cannot be pickled."""
    if isinstance(error, ConfigError):
        raised = ConfigError("\n".join([str(error), *getattr(error, "__notes__", ())]))
        raised.exit_code = error.exit_code
        return raised
    if isinstance(error, KeyboardInterrupt):
        return SystemExit(EXIT_INTERRUPTED)
    if isinstance(error, SystemExit):
        return SystemExit(error.code if isinstance(error.code, int) else str(error.code))
    text = "".join(traceback.format_exception(error)).rstrip()
    if re.search(r"gloo/|NCCL|Dist\w*Error|TimeoutError", text):  # another rank is probably the cause
        end = time.monotonic() + _CAUSE
        while time.monotonic() < end and first_failure(store) is None:
            time.sleep(0.02)
        with contextlib.suppress(RuntimeError):  # the store is gone
            if left := [str(one) for one in range(world_size) if store.check([f"{_LEFT}/{one}"])]:
                text += f"\nrank(s) {', '.join(left)} had ended before, without an error"
    return _failed_first(rank, text)


@contextlib.contextmanager
def ends_without_answer() -> Iterator[None]:
    """Write stacks and exit with code 1 if the body takes longer than 20 s: calls of a store behind a broken network
    never return."""
    faulthandler.dump_traceback_later(_NO_ANSWER, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
