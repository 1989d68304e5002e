"""Starting the processes of a run, and ending them together."""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from ..config import ConfigError
from ..hooks.control.interruption import EXIT_AGAIN, tell_workers_of_the_end
from . import comm
from .ranks.process import (
    DUMP_SIGNAL,
    GOOD_ORDER,
    Failure,
    Place,
    environment,
    has_left,
    hung_ranks,
    log_file,
    run_rank,
    watch_agent,
    watch_parent,
)

__all__ = ["DEFAULT_TIMEOUT", "launch", "launched_by_torchrun", "note_training", "restarted"]

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others."""

# Signals that the launcher passes on to the ranks.
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]
# Seconds after the first failure until the launcher kills the ranks that are left. Most end earlier by themselves.
_GRACE = 8.0


def launch(
    main_func: Callable[..., Any],
    num_gpus_per_machine: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: tuple[Any, ...] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
    *,
    device: str = "auto",
) -> Any:
    """Run ``main_func(*args)`` in each process of a run. The arguments are detectron2's.

    - One process on one machine: the function is called here.
    - Several: the processes are started on this machine, each with a GPU of its own if there are any, and join a
      process group (NCCL for tensors on GPUs, gloo for the rest).
    - Several machines: each calls this with the same arguments, except for ``machine_rank``.
    - In a process that torchrun started, nothing is started: the process joins the others.

    When one process fails, all end within about ten seconds, and the first failure is raised here. Signals are passed
    on to the processes. A function of a notebook or of ``python -c`` runs in forked processes, which cannot use CUDA
    if this process has used it. Any other function, and its arguments, must be picklable, and the script needs
    ``if __name__ == "__main__":``.

    Args:
        main_func: the function.
        num_gpus_per_machine: processes on each machine; without GPUs they share its cores.
        num_machines: number of machines.
        machine_rank: number of this one, from 0.
        dist_url: address of machine 0, as ``tcp://host:port``. "auto" or None: a free port, for one machine.
        args: arguments of ``main_func``.
        timeout: how long a rank waits for the others, at the start, in collectives and at barriers, before it fails.
        device: "auto" (GPUs if there are any), "cuda" or "cpu".

    Returns:
        What ``main_func`` returned, in the first process of this machine; None if that cannot be pickled.

    Raises:
        ConfigError: the arguments are invalid, machines are missing or differ, or a rank raised it.
        SystemExit: the ranks ended with an exit code.
        torch.multiprocessing.ProcessRaisedException: a rank raised another exception, or hung; the message has its
            traceback or stack.
        torch.multiprocessing.ProcessExitedException: a rank was killed, or left before the others.
    """
    if launched_by_torchrun():
        return _join_torchrun(main_func, args, num_gpus_per_machine, timeout, device)
    _check(num_gpus_per_machine, num_machines, machine_rank, device)
    if num_machines * num_gpus_per_machine == 1:
        return main_func(*args)
    address, port = _address(dist_url, num_machines)
    cuda = _use_cuda(device)
    if cuda and num_gpus_per_machine > torch.cuda.device_count():
        raise ConfigError(
            f"--num-gpus {num_gpus_per_machine}: this machine has {torch.cuda.device_count()} GPU(s); "
            "to train on its CPU cores set MODEL.DEVICE to cpu"
        )
    store = _open_store(address, port, machine_rank, timeout)
    places = [
        Place(
            machine_rank * num_gpus_per_machine + local_rank,
            num_machines * num_gpus_per_machine,
            local_rank,
            num_gpus_per_machine,
            cuda,
            timeout,
        )
        for local_rank in range(num_gpus_per_machine)
    ]
    with _open_until_all_end(store, machine_rank), tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        with _Forwarding() as forwarding:
            processes = _start(places, (address, store.port), main_func, args, result)
            forwarding.to(processes)
            codes = _wait(processes, places, store)
        _end_what_is_left(processes, codes)
        asked_to_end = [code for code in codes.values() if -code in forwarding.passed_on]
        if asked_to_end:  # before training, or after it: the ranks have no handlers of their own then
            again = {getattr(signal, name, 0) for name in ("SIGTERM", "SIGUSR1")}
            raise SystemExit(EXIT_AGAIN if -asked_to_end[0] in again else 128 - asked_to_end[0])
        _raise_what_happened(processes, places, codes, store)
        return pickle.loads(result.read_bytes()) if result.exists() else None


def launched_by_torchrun() -> bool:
    """Whether this process was started as one of several, by torchrun or in its way."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))


def restarted(output_dir: str) -> bool:
    """Whether torchrun starts a run again that had begun to train. Every rank must call it; all get the same answer.

    torchrun's own count of restarts differs from machine to machine, and machines that join or leave do not change it.

    Args:
        output_dir: the run's folder.
    """
    mark = _mark(output_dir)
    again = mark is not None and mark.exists() and mark.read_text() != str(os.getpid())
    return any(comm.all_gather(again))


def note_training(output_dir: str) -> None:
    """Let :func:`restarted` know that the run in ``output_dir`` begins to train."""
    if mark := _mark(output_dir):
        mark.write_text(str(os.getpid()))


def _mark(output_dir: str) -> Path | None:
    """A file of the torchrun agent that started this process: it stays when the agent starts its processes again."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # <folder of the agent>/attempt_0/<local rank>/error.json
    if not error_file:
        return None
    number = zlib.crc32(os.path.abspath(output_dir).encode())
    return Path(error_file).parents[2] / f"hookline_{number:08x}_{os.environ['LOCAL_RANK']}"


def _check(processes: int, machines: int, machine_rank: int, device: str) -> None:
    if processes < 1 or machines < 1:
        raise ConfigError(f"--num-gpus {processes} --num-machines {machines}: each must be at least 1")
    if not 0 <= machine_rank < machines:
        raise ConfigError(f"--machine-rank {machine_rank}: must be from 0 to {machines - 1} (--num-machines - 1)")
    if processes * machines > 1:
        _check_device(device)


def _check_device(device: str) -> None:
    """With several processes."""
    if device.startswith("mps"):
        raise ConfigError("MODEL.DEVICE: mps works in one process only; use --num-gpus 1, or the device cpu")
    if device.startswith("cuda:"):
        raise ConfigError(f"MODEL.DEVICE: each process has a GPU of its own; use cuda instead of {device}")


def _use_cuda(device: str) -> bool:
    return device in ("auto", "cuda") and torch.cuda.is_available()


def _address(dist_url: str | None, machines: int) -> tuple[str, int]:
    """Host and port where the ranks meet; port 0: any that is free."""
    if dist_url in (None, "", "auto"):
        if machines > 1:
            raise ConfigError(
                "--dist-url: several machines need the address of machine 0, such as tcp://10.0.0.1:29500"
            )
        return "127.0.0.1", 0
    url = urlparse(dist_url)
    try:
        host, port = url.hostname, url.port
    except ValueError:  # a port that is no number
        host = port = None
    if url.scheme != "tcp" or not host or not port:
        raise ConfigError(f"--dist-url {dist_url}: write it as tcp://host:port, such as tcp://10.0.0.1:29500")
    return host, port


def _open_store(address: str, port: int, machine_rank: int, timeout: timedelta) -> dist.TCPStore:
    """The store that all ranks meet in. Machine 0's launcher keeps it, so it outlives all ranks."""
    try:
        return dist.TCPStore(address, port, is_master=machine_rank == 0, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        what = (
            "cannot be opened here"
            if machine_rank == 0
            else f"did not answer within {timeout.total_seconds():g} s (PARALLEL.TIMEOUT); start machine 0 as well"
        )
        raise ConfigError(f"--dist-url tcp://{address}:{port} {what} ({str(error).splitlines()[0]})") from None


@contextmanager
def _open_until_all_end(store: dist.TCPStore, machine_rank: int) -> Iterator[None]:
    """Within it the launchers use the store. Machine 0, which keeps it, waits some time for those that are there."""
    here, done = "hookline/launchers", "hookline/launchers_done"
    store.add(here, 1)
    try:
        yield
    finally:
        with suppress(RuntimeError):  # machine 0 has ended
            store.add(done, 1)
            end = time.monotonic() + _GRACE + 2
            while machine_rank == 0 and store.add(done, 0) < store.add(here, 0) and time.monotonic() < end:
                time.sleep(0.02)


def _join_torchrun(
    main_func: Callable[..., Any], args: tuple[Any, ...], processes: int, timeout: timedelta, device: str
) -> Any:
    """This is one of torchrun's processes."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, world_size, local_rank = (int(os.environ[name]) for name in names)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes not in (1, local_size):
        raise ConfigError(f"--num-gpus {processes}: torchrun started {local_size} process(es) here; leave it out")
    if dist.is_torchelastic_launched():
        watch_agent()
    if world_size == 1:
        return main_func(*args)
    _check_device(device)
    cuda = _use_cuda(device)
    if cuda and local_size > torch.cuda.device_count():
        raise ConfigError(
            f"torchrun --nproc-per-node {local_size}: this machine has {torch.cuda.device_count()} GPU(s)"
        )
    store, greet = _join_start(_torchruns_store(rank, timeout), rank, world_size)
    place = Place(rank, world_size, local_rank, local_size, cuda, timeout)

    @record  # hands an error to torchrun, which shows the one that came first when all have ended
    def run() -> Any:
        try:
            return run_rank(main_func, args, store, place, greet)
        except ConfigError as error:
            first = _first_failure(store)
            if first is None or first.rank == rank:  # all have the same to say
                sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None

    return run()


def _torchruns_store(rank: int, timeout: timedelta) -> dist.TCPStore:
    """The store at MASTER_ADDR. torchrun's agent keeps it, or else rank 0 does."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(address, port, is_master=keeps, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        seconds = f"{timeout.total_seconds():g} s (PARALLEL.TIMEOUT)"
        raise ConfigError(
            f"rank {rank} found no store at {address}:{port} within {seconds} ({str(error).splitlines()[0]})"
        ) from None


def _join_start(store: dist.TCPStore, rank: int, world_size: int) -> tuple[dist.Store, Callable[[], None]]:
    """Find the part of the store that belongs to this start of the ranks.

    The agent's store holds the keys of earlier starts as well, and nothing in a rank's environment numbers the starts.
    So each process writes down an id of its own, and rank 0 answers each id with its own, which names the part.

    Returns:
        That part; and a function that rank 0 calls again and again until all ranks are there, to answer them.
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
        raise ConfigError(f"rank 0 did not come within {seconds}, rank {rank} waited: start all machines") from None
    return dist.PrefixStore(f"hookline/{first}", store), lambda: None


# ---------------------------------------------------------------------- processes of our own


def _start(
    places: Sequence[Place],
    address: tuple[str, int],
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
    result: Path,
) -> list[Any]:
    method = _start_method(main_func)
    workers = multiprocessing.get_start_method(allow_none=True)
    context: Any = torch.multiprocessing.get_context(method)
    processes: list[Any] = []
    # A fork in the moment that the store's thread takes another rank in would copy a lock that is held: no rank goes
    # there before all are forked.
    forked = context.Event() if method == "fork" else None
    if method == "spawn":
        resource_tracker.ensure_running()  # or its start, with that of the first process, would undo what follows
    # They inherit this: Ctrl-C on a terminal waits until their imports are done, and _child() can say what it means.
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
            f"launch() gives main_func and args to new processes, which takes a function at the top of a module and "
            f"picklable arguments: {error}"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return processes


def _start_method(main_func: Callable[..., Any]) -> str:
    """New interpreters, which import the function; forks for a function that cannot be imported."""
    interactive = not hasattr(sys.modules["__main__"], "__file__")
    if not (interactive and getattr(main_func, "__module__", "") == "__main__"):
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
    os.setpgrp()  # Ctrl-C goes to the launcher alone, which passes it on: once, and to all
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # type: ignore[attr-defined]
    watch_parent(multiprocessing.parent_process())
    tell_workers_of_the_end()
    # Loader workers are started as they would be by the launcher itself, and as under torchrun: forked, on Linux.
    multiprocessing.set_start_method(workers, force=True)
    os.environ.update(environment(place, *address))
    if forked is not None:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        forked.wait()
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _cores() // place.local_size))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see _start
        value = run_rank(main_func, args, dist.TCPStore(*address, is_master=False, timeout=place.timeout), place)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ConfigError:
        raise SystemExit(2) from None
    except Exception:
        raise SystemExit(1) from None  # the launcher has the traceback
    if place.local_rank == 0 and value is not None:
        _keep(value, result)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _keep(value: Any, path: Path) -> None:
    try:
        path.write_bytes(pickle.dumps(value))
    except Exception as error:  # pickling raises what it likes
        logger.debug("launch() cannot return main_func's result: %s", error)


class _Forwarding:
    """Within it signals that this process gets go to other processes instead, those from before they started too.

    Attributes:
        passed_on: the numbers of those there were.
    """

    def __init__(self) -> None:
        self.passed_on: list[int] = []
        self._processes: Sequence[Any] = ()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Forwarding":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                    self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def to(self, processes: Sequence[Any]) -> None:
        """The processes are there."""
        self._processes = processes
        for number in self.passed_on:
            self._send(number)

    def _pass_on(self, number: int, frame: Any) -> None:
        self.passed_on.append(number)
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)


def _wait(processes: Sequence[Any], places: Sequence[Place], store: dist.TCPStore) -> dict[int, int]:
    """Wait until all processes have ended. After a failure, kill those that do not end by themselves.

    Returns:
        By index, the exit codes of those that ended by themselves.
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
            _tell_for(processes[index], places[index].rank, store)
            if code not in GOOD_ORDER and failed_at is None:
                failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _GRACE:
            blocked = [(processes[index], places[index]) for index in range(len(processes)) if index not in codes]
            for process, place in blocked:
                sys.stderr.write(f"rank {place.rank} is killed, since its interpreter is blocked; it stands here:\n")
                sys.stderr.flush()
                os.kill(process.pid, DUMP_SIGNAL)
                process.join(0.5)
            for process, _ in blocked:
                process.kill()
                process.join()
            return codes
    return codes


def _end_what_is_left(processes: Sequence[Any], codes: Mapping[int, int]) -> None:
    """Kill the child processes of ranks that were killed or failed: loader workers would keep the terminal open."""
    for index, process in enumerate(processes):
        if codes.get(index) not in GOOD_ORDER:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # a group of the rank's own, see _child()


def _tell_for(process: Any, rank: int, store: dist.TCPStore) -> None:
    """Write to the store how a rank ended that could not do so itself."""
    if process.exitcode < 0:
        Failure(rank, "killed", _how_killed(process)).tell(store)
        return
    with suppress(RuntimeError):  # machine 0 keeps the store, and has ended
        if process.exitcode not in GOOD_ORDER and not has_left(store, rank):
            text = f"process {process.pid} ended without an exception, as by os._exit({process.exitcode})"
            Failure(rank, "left", text, process.exitcode).tell(store)


def _how_killed(process: Any) -> str:
    try:
        name = signal.Signals(-process.exitcode).name
    except ValueError:
        name = f"signal {-process.exitcode}"
    return f"process {process.pid} was killed by {name}"


def _raise_what_happened(
    processes: Sequence[Any], places: Sequence[Place], codes: Mapping[int, int], store: dist.TCPStore
) -> None:
    """Raise what the ranks ended with, if it is not success."""
    bad = {index: code for index, code in codes.items() if code}
    if not bad and len(codes) == len(processes):
        return
    first = _first_failure(store)
    if first is None:
        worst = [code for code in bad.values() if code not in GOOD_ORDER]
        raise SystemExit((worst or list(bad.values()))[0])
    if first.kind == "config":
        raise ConfigError(first.text)
    if first.kind == "interrupted" and set(bad.values()) <= set(GOOD_ORDER):  # all were, as by Ctrl-C
        raise SystemExit(130)
    if first.kind == "killed" and "SIGABRT" in first.text:  # as NCCL does when a collective has timed out
        with suppress(RuntimeError):  # machine 0 keeps the store, and has ended
            stacks = hung_ranks(store, places[0].world_size)
            hung = [f"Rank {rank} worked on here:\n{stack}" for rank, stack in stacks.items()]
            first = Failure(first.rank, "killed", "\n".join([first.text, *hung]))
    if places[0].rank == 0:
        _log_first(first, log_file(store))
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


def _first_failure(store: dist.Store) -> Failure | None:
    try:
        return Failure.first(store)
    except RuntimeError:  # machine 0 keeps it, and has ended
        return None


def _log_first(failure: Failure, path: str) -> None:
    """Append the first failure to the run's log, below what the other ranks logged after it."""
    if path and os.path.isfile(path):
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"[{now},000 launch] {__name__} ERROR: {failure.describe()}\n")
