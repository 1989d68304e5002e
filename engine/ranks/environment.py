"""What a process knows of the others: who started it, whether all are alike, and whether this is a restart."""

import os
import platform
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hookline

from ...config import CfgNode, ConfigError
from .. import comm

__all__ = [
    "LOG_FILE",
    "check_alone",
    "check_same_config",
    "launched_by_torchrun",
    "note_training",
    "restarted",
    "set_log_file",
    "uses_gpus",
]

LOG_FILE = "hookline/log_file"
"""Key in the ranks' store: the path of the run's log, to which the launcher appends the first failure."""

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


def uses_gpus(device: str, processes: int, option: str) -> bool:
    """Whether each of several ranks has a GPU.

    Args:
        device: ``MODEL.DEVICE``.
        processes: the number of ranks on this machine.
        option: what has set it, for messages.

    Raises:
        ConfigError: the device works in a single process only, or there are too few GPUs.
    """
    if device.startswith("mps"):
        raise ConfigError("MODEL.DEVICE: mps works in one process only; use --num-gpus 1, or the device cpu")
    if device.startswith("cuda:"):
        raise ConfigError(f"MODEL.DEVICE: each process has its own GPU; use cuda instead of {device}")
    if device not in ("auto", "cuda") or not torch.cuda.is_available():
        return False
    if processes > torch.cuda.device_count():
        raise ConfigError(
            f"{option} {processes}: this machine has {torch.cuda.device_count()} GPU(s); "
            "to train on its CPU cores set MODEL.DEVICE to cpu"
        )
    return True


def check_same_config(cfg: CfgNode, options: Mapping[str, Any]) -> None:
    """Check that all ranks have the same config, command line and versions. Every rank must call it.

    Args:
        cfg: the full config.
        options: the command line's options, by name.

    Raises:
        ConfigError: a rank differs from rank 0. All ranks raise it, and the message lists the differences.
    """
    if comm.get_world_size() == 1:
        return
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"hookline": hookline.__version__, "torch": torch.__version__.partition("+")[0], "Python": python}
    mine = {key: repr(value) for key, value in {**cfg.flatten(), **options, **versions}.items()}
    (_, first), *others = comm.all_gather((platform.node(), mine))
    for rank, (node, other) in enumerate(others, start=1):
        keys = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if keys:
            found = [f"{key} is {other.get(key, 'missing')} (rank 0: {first.get(key, 'missing')})" for key in keys]
            raise ConfigError(
                f"rank {rank}, on {node}, has another config than rank 0: {'; '.join(found)}. "
                "Start all machines with the same config, command line and versions"
            )


def set_log_file(path: str) -> None:
    """Pass the path of the run's log to the launcher, which writes the first failure there."""
    store: Any = comm.get_store()
    if store is None or not comm.is_main_process():
        return
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    store.set(LOG_FILE, os.path.abspath(path))


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
