"""Ranks that torchrun started: how they find each other, and whether this is a restart."""

import os
import sys
import uuid
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...config import ConfigError
from .. import comm
from .failures import Failure
from .process import Place, run_rank, uses_gpus, watch_parent

__all__ = ["check_alone", "join_torchrun", "launched_by_torchrun", "note_training", "restarted"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Other launchers: their variables with the number of processes, and with the number of this one on its machine. Not
# SLURM_NTASKS, which a batch script has too.
_LAUNCHERS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def launched_by_torchrun() -> bool:
    """Whether torchrun, or another launcher that sets the same variables, started this process.

    If only LOCAL_RANK is missing, it is set from the variable of srun or mpirun, if these started as many processes.
    """
    for _, size, local_rank in _LAUNCHERS:
        if "RANK" in os.environ and local_rank in os.environ and os.environ.get(size) == os.environ.get("WORLD_SIZE"):
            os.environ.setdefault("LOCAL_RANK", os.environ[local_rank])
    return all(name in os.environ for name in _VARIABLES)


def check_alone() -> None:
    """Check that this process, which joins no others, was not started as one of several.

    Raises:
        ConfigError: it was, so each of them would train alone.
    """
    environment = os.environ
    ranks = int(environment.get("WORLD_SIZE") or 1) if "RANK" in environment else 1
    if launched_by_torchrun():
        if ranks > 1:
            raise ConfigError(
                f"this is one of {ranks} processes that torchrun started, and it has not joined the others: put what "
                "the script does into a function main(), and call launch(main, 1)"
            )
        return
    if ranks > 1:
        missing = [name for name in _VARIABLES if name not in environment]
        raise ConfigError(
            f"RANK and WORLD_SIZE say that this is one of {ranks} processes, but without {', '.join(missing)} it "
            "would train alone. Start it with torchrun, or set all of its variables (LOCAL_RANK: number of the process "
            "on its machine)"
        )
    for launcher, size, _ in _LAUNCHERS:
        if (tasks := environment.get(size, "")).isdigit() and int(tasks) > 1:
            raise ConfigError(
                f"this is one of {tasks} processes that {launcher} started ({size}), and each of them would train "
                "alone. Start one process on each machine, with --num-gpus, --num-machines, --machine-rank and "
                "--dist-url, or torchrun on each (docs/distributed.md). For separate runs, unset the variable"
            )


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
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, world_size, local_rank = (int(os.environ[name]) for name in names)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes not in (1, local_size):
        raise ConfigError(f"--num-gpus {processes}: torchrun started {local_size} process(es) here; leave it out")
    if dist.is_torchelastic_launched():
        watch_parent()
    if world_size == 1:
        return main_func(*args)
    cuda = uses_gpus(device)
    if cuda and local_size > torch.cuda.device_count():
        raise ConfigError(
            f"torchrun --nproc-per-node {local_size}: this machine has {torch.cuda.device_count()} GPU(s)"
        )
    store, greet = _join_start(_open_store(rank, timeout), rank, world_size)
    place = Place(rank, world_size, local_rank, local_size, cuda, timeout)

    from torch.distributed.elastic.multiprocessing.errors import record  # slow to import

    @record  # passes an error to torchrun, which shows the earliest one when all ranks have ended
    def run() -> Any:
        try:
            return run_rank(main_func, args, store, place, greet)
        except ConfigError as error:
            first = Failure.first(store)
            if first is None or first.rank == rank:  # all ranks have the same message
                sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None

    return run()


def _open_store(rank: int, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store at MASTER_ADDR. torchrun's agent keeps it, or else rank 0."""
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


# ---------------------------------------------------------------------- restarts


def restarted(output_dir: str) -> bool:
    """Whether torchrun restarts a run that had begun to train. Every rank must call it; all get the same answer.

    torchrun's own count of restarts differs between machines, and does not change when machines join or leave.

    Args:
        output_dir: the run's folder.
    """
    mark = _mark(output_dir)
    again = mark is not None and mark.exists() and mark.read_text() != str(os.getpid())
    return any(comm.all_gather(again))


def note_training(output_dir: str) -> None:
    """Record for :func:`restarted` that the run in ``output_dir`` begins to train."""
    if mark := _mark(output_dir):
        mark.write_text(str(os.getpid()))


def _mark(output_dir: str) -> Path | None:
    """A file in the folder of the torchrun agent, which keeps it when it restarts its processes."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # <folder of the agent>/attempt_0/<local rank>/error.json
    if not error_file:
        return None
    number = zlib.crc32(os.path.abspath(output_dir).encode())
    return Path(error_file).parents[2] / f"hookline_{number:08x}_{os.environ['LOCAL_RANK']}"
