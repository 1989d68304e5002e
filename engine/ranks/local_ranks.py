"""Starts the ranks of this machine, passes signals on to them, and reports how they ended."""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from ...config import ConfigError
from ...hooks.control.interruption import EXIT_AGAIN, announce_exit_to_workers
from .failures import CLEAN_EXIT_CODES, LOG_FILE, Failure, busy_ranks, ends_without_answer, has_left
from .process import DUMP_SIGNAL, Place, run_rank, watch_parent

__all__ = ["GRACE", "run_local_ranks"]

logger = logging.getLogger(__name__)

GRACE = 8.0
"""Seconds after the first failure until the remaining ranks are killed. Most end earlier by themselves."""

# Signals that are passed on to the ranks.
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]


def run_local_ranks(
    main_func: Callable[..., Any], args: tuple[Any, ...], store: dist.TCPStore, address: str, places: Sequence[Place]
) -> Any:
    """Run ``main_func(*args)`` in the ranks of this machine.

    Args:
        main_func, args: the function and its arguments.
        store: the store in which all ranks meet.
        address: its host.
        places: the places of this machine's ranks.

    Returns:
        What the function returned in the first of these ranks; None if that cannot be pickled.

    Raises:
        Exception: see :func:`~hookline.engine.launch`.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        with _Forwarding() as forwarding:
            processes = _start(places, (address, store.port), main_func, args, result)
            forwarding.to(processes)
            codes = _wait(processes, places, store)
        _kill_children(processes, codes)
        stopped = [code for code in codes.values() if -code in forwarding.numbers]
        if stopped:  # before or after training, when ranks have no signal handlers
            again = {getattr(signal, name, 0) for name in ("SIGTERM", "SIGUSR1")}
            raise SystemExit(EXIT_AGAIN if -stopped[0] in again else 128 - stopped[0])
        with ends_without_answer("the launcher"):
            _raise_failure(processes, places, codes, store)
        return pickle.loads(result.read_bytes()) if result.exists() else None


# ---------------------------------------------------------------------- starting


def _start(
    places: Sequence[Place],
    address: tuple[str, int],
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
    result: Path,
) -> list[Any]:
    method = _start_method(main_func, args)
    workers = multiprocessing.get_start_method(allow_none=True)
    context: Any = torch.multiprocessing.get_context(method)
    processes: list[Any] = []
    # A fork while the store's thread accepts a connection would copy a lock that is held. So no rank connects before
    # all ranks are forked.
    forked = context.Event() if method == "fork" else None
    if method == "spawn":
        resource_tracker.ensure_running()  # starting it later, with the first process, would unblock SIGINT
    # Ranks inherit the blocked signal: Ctrl-C in a terminal waits until _child() can handle it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for place in places:
            process = context.Process(target=_child, args=(place, address, main_func, args, result, forked, workers))
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
    return processes


def _start_method(main_func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Spawn new interpreters, which import the function and its arguments. Fork if a notebook defines one of them."""
    interactive = not hasattr(sys.modules["__main__"], "__file__")
    if not (interactive and any(getattr(one, "__module__", "") == "__main__" for one in (main_func, *args))):
        return "spawn"
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "launch(): this notebook has used CUDA already, so it cannot be forked; restart it and launch first, "
            "or put the function into a module"
        )
    return "fork"


def _child(
    place: Place,
    address: tuple[str, int],
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
    result: Path,
    forked: Any,
    workers: str | None,
) -> None:
    os.setpgrp()  # Ctrl-C reaches the launcher only, which passes it on once to all ranks
    watch_parent()
    announce_exit_to_workers()
    # Loader workers start with the launcher's own start method (on Linux, fork), as under torchrun.
    multiprocessing.set_start_method(workers, force=True)
    os.environ.update(  # as torchrun does, for libraries that read them
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_size),
        MASTER_ADDR=address[0],
        MASTER_PORT=str(address[1]),
    )
    if forked is not None:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        forked.wait()
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _cores() // place.local_size))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked in _start()
        value = run_rank(main_func, args, dist.TCPStore(*address, is_master=False, timeout=place.timeout), place)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ConfigError:
        raise SystemExit(2) from None
    except Exception:
        raise SystemExit(1) from None  # the launcher has the traceback
    if place.local_rank == 0 and value is not None:
        _write_result(value, result)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write_result(value: Any, path: Path) -> None:
    try:
        path.write_bytes(pickle.dumps(value))
    except Exception as error:  # pickling may raise anything
        logger.debug("launch() cannot return main_func's result: %s", error)


class _Forwarding:
    """A context in which signals to this process are passed on to the ranks, even signals from before they started.

    Attributes:
        numbers: the signals so far.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._processes: Sequence[Any] = ()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Forwarding":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def to(self, processes: Sequence[Any]) -> None:
        """Set the ranks' processes."""
        self._processes = processes
        for number in self.numbers:
            self._send(number)

    def _handle(self, number: int, frame: Any) -> None:
        self.numbers.append(number)
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)


# ---------------------------------------------------------------------- ending


def _wait(processes: Sequence[Any], places: Sequence[Place], store: dist.TCPStore) -> dict[int, int]:
    """Wait until all processes have ended. After a failure, kill those that do not end by themselves.

    Returns:
        The exit codes of the processes that ended by themselves, by index.
    """
    codes: dict[int, int] = {}
    failed_at = None
    while len(codes) < len(processes):
        left = [index for index in range(len(processes)) if index not in codes]
        wait([processes[index].sentinel for index in left], timeout=0.5)
        for index in left:
            code = processes[index].exitcode
            if code is None:
                continue
            codes[index] = code
            with ends_without_answer("the launcher"):
                _report_for(processes[index], places[index].rank, store)
            if code not in CLEAN_EXIT_CODES and failed_at is None:
                failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE:
            blocked = [(processes[index], places[index]) for index in range(len(processes)) if index not in codes]
            for process, place in blocked:
                sys.stderr.write(f"rank {place.rank} is killed: its interpreter is blocked; its stack:\n")
                sys.stderr.flush()
                os.kill(process.pid, DUMP_SIGNAL)
                process.join(0.5)
            for process, _ in blocked:
                process.kill()
                process.join()
            return codes
    return codes


def _kill_children(processes: Sequence[Any], codes: Mapping[int, int]) -> None:
    """Kill the children of ranks that were killed or failed: loader workers would keep the terminal open."""
    for index, process in enumerate(processes):
        if codes.get(index) not in CLEAN_EXIT_CODES:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # each rank has its own process group, see _child()


def _report_for(process: Any, rank: int, store: dist.TCPStore) -> None:
    """Report the failure of a rank that could not do so itself."""
    if process.exitcode < 0:
        name = {number.value: number.name for number in signal.Signals}.get(-process.exitcode, "a signal")
        Failure(rank, "killed", f"process {process.pid} was killed by {name}").report(store)
        return
    with suppress(RuntimeError):  # machine 0 has ended, and the store with it
        if process.exitcode not in CLEAN_EXIT_CODES and not has_left(store, rank):
            text = f"process {process.pid} ended without an exception, as by os._exit({process.exitcode})"
            Failure(rank, "left", text, process.exitcode).report(store)


def _raise_failure(
    processes: Sequence[Any], places: Sequence[Place], codes: Mapping[int, int], store: dist.TCPStore
) -> None:
    """Raise the first failure of the ranks, if there was one."""
    bad = {index: code for index, code in codes.items() if code}
    if not bad and len(codes) == len(processes):
        return
    first = Failure.first(store)
    if first is None:
        try:
            store.check([LOG_FILE])
        except RuntimeError:
            sys.stderr.write("error: machine 0 has ended, and the run's store with it\n")
        worst = [code for code in bad.values() if code not in CLEAN_EXIT_CODES]
        raise SystemExit((worst or list(bad.values()))[0])
    if first.kind == "config":
        raise ConfigError(first.text)
    if first.kind == "interrupted" and set(bad.values()) <= set(CLEAN_EXIT_CODES):  # all ranks were, as by Ctrl-C
        raise SystemExit(130)
    if first.kind == "killed" and "SIGABRT" in first.text:  # NCCL aborts when a collective times out
        with suppress(RuntimeError):  # machine 0 has ended, and the store with it
            stacks = busy_ranks(store, places[0].world_size)
            hung = [f"Rank {rank} did not wait for others, its stack:\n{stack}" for rank, stack in stacks.items()]
            first = Failure(first.rank, "killed", "\n".join([first.text, *hung]))
    if places[0].rank == 0:
        _log(first, store)
    if first.kind == "interrupted":
        sys.stderr.write(f"{first.describe()}\n")
        raise SystemExit(130)
    index = next((index for index, place in enumerate(places) if place.rank == first.rank), -1)
    process_id = processes[index].pid if index >= 0 else -1
    if first.kind in ("killed", "left"):
        code = codes.get(index, first.code)
        message = f"rank {first.rank} of {places[0].world_size} {first.how} first: {first.text}"
        if first.kind == "left" and code is not None:
            message += f"\nIts exit code was {code}"
        raise ProcessExitedException(message, index, process_id, 1 if code is None else code)
    raise ProcessRaisedException(first.describe(), index, process_id)


def _log(failure: Failure, store: dist.TCPStore) -> None:
    """Append the first failure to the run's log, after what other ranks logged."""
    path = store.get(LOG_FILE).decode() if store.check([LOG_FILE]) else ""
    if os.path.isfile(path):
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"[{now},000 launch] {__name__} ERROR: {failure.describe()}\n")
