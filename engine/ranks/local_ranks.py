"""Starts the ranks of this machine, passes signals on to them, and reports how they ended.

torch's ``elastic_launch`` is not used: it waits 30 s for a rank with a blocked interpreter, has one time limit for
ranks that hang and ranks that save after SIGTERM, and sends SIGTERM for a second Ctrl-C.
"""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from ...config import ConfigError
from ...hooks.control.interruption import EXIT_AGAIN, announce_exit_to_workers
from .environment import LOG_FILE
from .failures import CLEAN_EXIT_CODES, Failure, ends_without_answer, read_statuses, waits
from .process import DUMP_SIGNAL, run_rank, watch_parent

__all__ = ["GRACE", "run_local_ranks"]

logger = logging.getLogger(__name__)

GRACE = 8.0
"""Seconds after the first failure until the remaining ranks are killed. Most end earlier by themselves."""

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

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
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
        with _handled_by(forward):
            _start(processes, places, (main_func, args, timeout, cuda, result))
            codes = _wait(processes, ranks, store)
        for index, process in enumerate(processes):
            if codes.get(index) not in CLEAN_EXIT_CODES:  # loader workers would keep the terminal open
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # each rank has its own process group, see _child()
        stopped = [-code for code in codes.values() if -code in received]
        if stopped:  # before or after training, when ranks have no signal handlers
            raise SystemExit(EXIT_AGAIN if stopped[0] in (signal.SIGTERM, signal.SIGUSR1) else 128 + stopped[0])
        with ends_without_answer("the launcher"):
            _raise_failure(processes, ranks, world_size, codes, store)
        return pickle.loads(result.read_bytes()) if result.exists() else None


# ---------------------------------------------------------------------- starting


@contextmanager
def _handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _start(processes: list[Any], places: Sequence[Mapping[str, str]], what: tuple[Any, ...]) -> None:
    """Add the started processes to ``processes``. ``what`` are the other arguments of ``_child()``."""
    main_func, args, *_ = what
    method = _start_method(main_func, args)
    context: Any = torch.multiprocessing.get_context(method)
    # A fork while the store's thread accepts a connection would copy a lock that is held. So no rank connects before
    # all ranks are forked.
    forked = context.Event() if method == "fork" else None
    if method == "spawn":
        resource_tracker.ensure_running()  # starting it later, with the first process, would unblock signals
    workers = multiprocessing.get_start_method(allow_none=True)
    # A signal waits until all processes are there, and in these until _child() can handle it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        for place in places:
            process = context.Process(target=_child, args=(place, os.getpid(), forked, workers, *what))
            process.start()
            processes.append(process)
        if forked is not None:
            forked.set()
    except BaseException as error:
        for process in processes:
            process.kill()
        if not isinstance(error, pickle.PicklingError | AttributeError | TypeError):
            raise
        raise TypeError(
            f"launch() passes main_func and args to new processes: main_func must be a function at the top of a "
            f"module, and args must be picklable: {error}"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_method(main_func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Spawn new interpreters, which import the function and its arguments. Fork if they cannot, as in a notebook."""
    script = getattr(sys.modules["__main__"], "__file__", None)  # "<stdin>" if Python reads the script from there
    defined_here = any(getattr(one, "__module__", "") == "__main__" for one in (main_func, *args))
    if os.path.isfile(script or "") or (script is None and not defined_here):
        return "spawn"
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "launch(): this notebook has used CUDA already, so it cannot be forked; restart it and launch first, "
            "or put the function into a module"
        )
    return "fork"


def _child(
    place: Mapping[str, str],
    launcher: int,
    forked: Any,
    workers: str | None,
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: timedelta,
    cuda: bool,
    result: Path,
) -> None:
    os.setpgrp()  # Ctrl-C reaches the launcher only, which passes it on once to all ranks
    watch_parent(launcher)
    announce_exit_to_workers()
    # Loader workers start with the launcher's own start method (on Linux, fork), as under torchrun.
    multiprocessing.set_start_method(workers, force=True)
    os.environ.update(place)
    if forked is not None:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        forked.wait()
    elif "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(place["LOCAL_WORLD_SIZE"])))
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # a fork has the launcher's handlers
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # blocked in _start()
        address = place["MASTER_ADDR"], int(place["MASTER_PORT"])
        value = run_rank(main_func, args, dist.TCPStore(*address, is_master=False, timeout=timeout), timeout, cuda)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ConfigError:
        raise SystemExit(2) from None
    except Exception:
        raise SystemExit(1) from None  # the launcher has the traceback
    if place["LOCAL_RANK"] == "0" and value is not None:
        try:
            result.write_bytes(pickle.dumps(value))
        except Exception as error:  # pickling may raise anything
            logger.debug("launch() cannot return main_func's result: %s", error)


# ---------------------------------------------------------------------- ending


def _wait(processes: Sequence[Any], ranks: range, store: dist.TCPStore) -> dict[int, int]:
    """Wait until all processes have ended. After a failure, kill those that do not end by themselves.

    Returns:
        The exit codes of the processes that ended by themselves, by index.
    """
    codes: dict[int, int] = {}
    failed_at = None
    while len(codes) < len(processes):
        left = {index: process for index, process in enumerate(processes) if index not in codes}
        wait([process.sentinel for process in left.values()], timeout=0.5)
        for index, process in left.items():
            if process.exitcode is None:
                continue
            codes[index] = process.exitcode
            with ends_without_answer("the launcher"):
                _report_for(process, ranks[index], store)
            if process.exitcode not in CLEAN_EXIT_CODES and failed_at is None:
                failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE:
            blocked = {index: process for index, process in left.items() if index not in codes}
            for index, process in blocked.items():
                sys.stderr.write(f"rank {ranks[index]} is killed: its interpreter is blocked; its stack:\n")
                sys.stderr.flush()
                os.kill(process.pid, DUMP_SIGNAL)
                process.join(0.5)
            for process in blocked.values():
                process.kill()
                process.join()
            return codes
    return codes


def _report_for(process: Any, rank: int, store: dist.TCPStore) -> None:
    """Report the failure of a rank that could not do so itself."""
    if process.exitcode < 0:
        name = {number.value: number.name for number in signal.Signals}.get(-process.exitcode, "a signal")
        Failure(rank, "killed", f"process {process.pid} was killed by {name}").report(store)
    elif process.exitcode not in CLEAN_EXIT_CODES:
        with suppress(RuntimeError):  # machine 0 has ended, and the store with it
            state, *_ = read_statuses(store, [rank]).get(rank, ("works", "", 0))
            if state == "works":  # after an exception it would have reported it
                text = f"process {process.pid} ended without an exception, as by os._exit({process.exitcode})"
                Failure(rank, "left", text, process.exitcode).report(store)


def _raise_failure(
    processes: Sequence[Any], ranks: range, world_size: int, codes: Mapping[int, int], store: dist.TCPStore
) -> None:
    """Raise the first failure of the ranks, if there was one."""
    bad = [code for code in codes.values() if code]
    if not bad and len(codes) == len(processes):
        return
    first = Failure.first(store)
    all_clean = set(bad) <= set(CLEAN_EXIT_CODES)
    if first is None:
        try:
            store.check([LOG_FILE])
        except RuntimeError:
            sys.stderr.write("error: machine 0 has ended, and the run's store with it\n")
        raise SystemExit(next((code for code in bad if code not in CLEAN_EXIT_CODES), bad[0]))
    if first.kind == "config":
        raise ConfigError(first.text)
    if first.kind == "interrupted" and all_clean:  # all ranks were, as by Ctrl-C
        raise SystemExit(130)
    text = first.text
    with suppress(RuntimeError):  # machine 0 has ended, and the store with it
        if first.kind == "killed" and "SIGABRT" in text:  # NCCL aborts when a collective times out
            for rank, (state, stack, _) in read_statuses(store, range(world_size)).items():
                if state == "works" and not waits(stack):
                    text += f"\nRank {rank} did not wait for others, its stack:\n{stack}"
            first = Failure(first.rank, "killed", text)
        path = store.get(LOG_FILE).decode() if ranks[0] == 0 and store.check([LOG_FILE]) else ""
        if os.path.isfile(path):  # after what other ranks logged
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"[{now},000 launch] {__name__} ERROR: {first.describe()}\n")
    if first.kind == "interrupted":
        sys.stderr.write(f"{first.describe()}\n")
        raise SystemExit(130)
    index = first.rank - ranks[0] if first.rank in ranks else -1
    process_id = processes[index].pid if index >= 0 else -1
    if first.kind not in ("killed", "left"):
        raise ProcessRaisedException(first.describe(), index, process_id)
    code = codes.get(index, first.code)
    message = f"rank {first.rank} of {world_size} {first.how} first: {first.text}"
    if first.kind == "left" and code is not None:
        message += f"\nIts exit code was {code}"
    raise ProcessExitedException(message, index, process_id, 1 if code is None else code)
