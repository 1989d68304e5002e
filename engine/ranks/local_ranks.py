"""Starts the ranks of this machine, passes signals on to them, and reports how they ended.

torch's ``elastic_launch`` is not used: it waits 30 s for a rank with a blocked interpreter, has one time limit for
ranks that hang and ranks that save after SIGTERM, and sends SIGTERM for a second Ctrl-C.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from ...command_line import handling_signals
from ...config import ConfigError
from ...hooks.control.interruption import EXIT_AGAIN, announce_exit_to_workers
from .process import (
    CLEAN_EXIT_CODES,
    DUMP_SIGNAL,
    Failure,
    ends_without_answer,
    read_statuses,
    run_rank,
    waits,
    watch_parent,
)

__all__ = ["GRACE", "run_local_ranks"]

GRACE = 8.0
"""Seconds after the first failure until the remaining ranks are killed. Most end earlier by themselves."""

# New interpreters: a fork would copy locks that threads hold, and could not use CUDA if this process has.
_METHOD = "spawn"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run_local_ranks(
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
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
    processes: list[Any] = []
    received: list[int] = []

    def forward(number: int, frame: Any) -> None:
        received.append(number)
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, number)

    places = [
        {  # as torchrun sets them
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank - ranks[0]),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(store.port),
        }
        for rank in ranks
    ]
    with handling_signals(**{number.name: forward for number in _SIGNALS}):
        _start(processes, places, (main_func, args, timeout, cuda))
        _wait(dict(zip(ranks, processes, strict=True)), store)
    codes = [process.exitcode for process in processes]
    stopped = [-code for code in codes if -code in received]
    if stopped:  # before or after training, when ranks have no signal handlers
        raise SystemExit(EXIT_AGAIN if stopped[0] in (signal.SIGTERM, signal.SIGUSR1) else 128 + stopped[0])
    with ends_without_answer():
        if any(codes):
            if 130 in codes and signal.SIGINT in received:
                raise SystemExit(130)
            raise _failure(store, ranks, world_size, processes)
        key = _result_key(ranks[0])
        with suppress(RuntimeError):  # machine 0 has ended, and the store with it
            return pickle.loads(store.get(key)) if store.check([key]) else None


def _result_key(rank: int) -> str:
    return f"hookline/result/{rank}"


# ---------------------------------------------------------------------- starting


def _start(processes: list[Any], places: Sequence[dict[str, str]], what: tuple[Any, ...]) -> None:
    """Add the started processes to ``processes``. ``what`` are the last arguments of ``_child()``."""
    main_func, args, *_ = what
    script = getattr(sys.modules["__main__"], "__file__", None) or ""  # "<stdin>" if Python reads it from there
    if not os.path.isfile(script) and any(getattr(one, "__module__", "") == "__main__" for one in (main_func, *args)):
        raise ConfigError(
            "launch(): several processes cannot import what a notebook or python -c defines: put main_func and the "
            "classes among its arguments into a module"
        )
    context: Any = torch.multiprocessing.get_context(_METHOD)
    resource_tracker.ensure_running()  # starting it later, with the first process, would unblock signals
    workers = multiprocessing.get_start_method(allow_none=True)
    # A signal waits until all processes are there, and in these until _child() can handle it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        for place in places:
            process = context.Process(target=_child, args=(place, os.getpid(), workers, *what))
            process.start()
            processes.append(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(
    place: dict[str, str],
    launcher: int,
    workers: str | None,
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: timedelta,
    cuda: bool,
) -> None:
    os.setpgrp()  # Ctrl-C reaches the launcher only, which passes it on once to all ranks
    watch_parent(launcher)
    announce_exit_to_workers()
    # Loader workers start with the launcher's own start method (on Linux, fork), as under torchrun.
    multiprocessing.set_start_method(workers, force=True)
    os.environ.update(place)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(place["LOCAL_WORLD_SIZE"])))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # blocked in _start()
        store = dist.TCPStore(place["MASTER_ADDR"], int(place["MASTER_PORT"]), is_master=False, timeout=timeout)
        value = run_rank(main_func, args, store, timeout, cuda)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ConfigError as error:
        raise SystemExit(error.exit_code) from None
    except Exception:
        raise SystemExit(1) from None  # the launcher has the traceback
    if place["LOCAL_RANK"] == "0" and value is not None:
        with suppress(Exception):  # pickling may raise anything
            store.set(_result_key(int(place["RANK"])), pickle.dumps(value))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- ending


def _wait(running: dict[int, Any], store: dist.TCPStore) -> None:
    """Wait until all processes, by rank, have ended. After a failure, kill those that do not end by themselves."""
    failed_at = None
    while running:
        wait([process.sentinel for process in running.values()], timeout=0.5)
        for rank, process in list(running.items()):
            if process.exitcode is None:
                continue
            del running[rank]
            with ends_without_answer():
                _report_for(process, rank, store)
            if process.exitcode not in CLEAN_EXIT_CODES:
                failed_at = failed_at or time.monotonic()
                with suppress(ProcessLookupError, PermissionError):  # loader workers would keep the terminal open
                    os.killpg(process.pid, signal.SIGKILL)  # each rank has its own process group, see _child()
        if failed_at is not None and time.monotonic() - failed_at > GRACE:
            for rank, process in running.items():
                sys.stderr.write(f"rank {rank} is killed: its interpreter is blocked; its stack:\n")
                os.kill(process.pid, DUMP_SIGNAL)
                process.join(0.5)
                process.kill()
                process.join()


def _report_for(process: Any, rank: int, store: dist.TCPStore) -> None:
    """Report the failure of a rank that could not do so itself."""
    code = process.exitcode
    if code < 0:
        name = next((number.name for number in signal.Signals if number == -code), f"signal {-code}")
        Failure(rank, "failed", f"process {process.pid} was killed by {name}").report(store)
    elif code not in (75, 130):
        with suppress(RuntimeError):  # machine 0 has ended, and the store with it
            state, _ = read_statuses(store, [rank]).get(rank, ("works", ""))
            if state == "works":  # after an exception it would have reported it
                text = f"process {process.pid} ended without an exception, as by os._exit(); its exit code was {code}"
                Failure(rank, "left", text).report(store)


def _failure(store: dist.TCPStore, ranks: range, world_size: int, processes: Sequence[Any]) -> BaseException:
    """Return the error for ranks that did not all end with exit code 0."""
    first, codes = Failure.first(store), [process.exitcode for process in processes]
    if first is None:  # machine 0 has ended, and the store with it; or the ranks have stopped
        return SystemExit(next((code for code in codes if code not in CLEAN_EXIT_CODES), max(codes)))
    if first.is_config_error:
        return first.config_error()
    text = first.describe()
    with suppress(RuntimeError):  # machine 0 has ended, and the store with it
        if "SIGABRT" in first.text:  # NCCL aborts when a collective times out
            for rank, (state, stack) in read_statuses(store, range(world_size)).items():
                if state == "works" and not waits(stack):
                    text += f"\nRank {rank} did not wait for others, its stack:\n{stack}"
    index = first.rank - ranks[0] if first.rank in ranks else -1
    return ProcessRaisedException(text, index, processes[index].pid if index >= 0 else -1)
