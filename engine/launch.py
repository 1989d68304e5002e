"""Starts the processes of a run, and looks at what started this one."""

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..config import ConfigError
from ..config.errors import error_text
from . import comm
from .parallel.processes import GRACE, ends_without_answer, first_failure, run_local_ranks, run_rank, watch_parent

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others."""


def launch(
    main_func: Callable[..., Any],
    num_gpus_per_machine: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: tuple[object, ...] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
    *,
    device: str = "auto",
) -> Any:
    """Run ``main_func(*args)`` in each process of a run. The arguments are detectron2's.

    - One process on one machine: the function is called here.
    - Several processes: they are started on this machine, each with its own GPU if there are any, and join a process
      group (NCCL for tensors on GPUs, gloo for the rest).
    - Several machines: each calls this with the same arguments, except for ``machine_rank``.
    - Under torchrun nothing is started: this process joins the others.
    - In a process that belongs to a process group already, the function is called here, as one of its ranks.

    If one process fails, all end within about ten seconds, and the first failure is raised here. Signals are passed on
    to the processes. The function and its arguments must be picklable and defined in a file, and the script needs
    ``if __name__ == "__main__":``.

    Args:
        main_func: the function.
        num_gpus_per_machine: processes on each machine; without GPUs they share its cores.
        num_machines: number of machines.
        machine_rank: rank of this machine, from 0.
        dist_url: address of machine 0, as ``tcp://host:port``. "auto" or None: a free port, for one machine.
        args: arguments of ``main_func``.
        timeout: how long a rank waits for the others, at the start, in collectives and at barriers, before it fails.
        device: "auto" (GPUs if there are any), "cuda" or "cpu".

    Returns:
        What ``main_func`` returned, in the first process of this machine; None if that cannot be pickled.

    Raises:
        ConfigError: the arguments are invalid, machines are missing or differ, or a rank raised it.
        SystemExit: the ranks ended with an exit code.
        torch.multiprocessing.ProcessRaisedException: a rank raised another exception, or its process was killed. The
            message has its number, and its traceback or exit code.
    """
    if dist.is_initialized():
        processes, ranks = num_machines * num_gpus_per_machine, comm.get_world_size()
        if processes not in (1, ranks):
            raise ConfigError(
                f"--num-gpus {num_gpus_per_machine} --num-machines {num_machines}: this process belongs to a process "
                f"group of {ranks} already, and launch() starts no others; leave them out"
            )
        return main_func(*args)
    if launched_by_torchrun():
        return _join_torchrun(main_func, args, num_gpus_per_machine, timeout, device)
    if num_gpus_per_machine < 1 or not 0 <= machine_rank < num_machines:
        raise ConfigError(
            f"--num-gpus {num_gpus_per_machine} --num-machines {num_machines} --machine-rank {machine_rank}: the "
            "numbers must be at least 1, and the rank from 0 to --num-machines - 1"
        )
    world_size = num_machines * num_gpus_per_machine
    if num_machines == 1:
        check_alone()
    if world_size == 1:
        return main_func(*args)
    cuda = uses_gpus(device, num_gpus_per_machine, "--num-gpus")
    address, port = _address(dist_url, num_machines)
    # All ranks meet in the store. Machine 0's launcher keeps it, so it outlives all ranks.
    store = _open_store(address, port, machine_rank == 0, timeout)
    here = range(machine_rank * num_gpus_per_machine, (machine_rank + 1) * num_gpus_per_machine)
    try:
        return run_local_ranks(main_func, args, store, address, here, world_size, timeout, cuda)
    finally:
        if machine_rank == 0:  # the other launchers read the first failure in the store
            comm.missing_ranks(store, "hookline/launchers", 0, num_machines, 2 * GRACE)
        else:
            with suppress(RuntimeError), ends_without_answer():  # RuntimeError: machine 0 has ended
                store.add("hookline/launchers", 1)


def _address(dist_url: str | None, machines: int) -> tuple[str, int]:
    """Host and port of the store; port 0 stands for any free port."""
    if machines == 1 and dist_url in (None, "", "auto"):
        return "127.0.0.1", 0
    if found := re.fullmatch(r"tcp://\[?(.+?)\]?:(\d+)/?", dist_url or ""):
        return found[1], int(found[2])
    raise ConfigError(
        f"--dist-url {dist_url}: several machines need the address of machine 0, as tcp://host:port, such as "
        "tcp://10.0.0.1:29500"
    )


def _open_store(address: str, port: int, here: bool, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store of the run, which this process keeps if it is ``here``."""
    try:
        return dist.TCPStore(address, port, is_master=here, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        raise ConfigError(
            f"--dist-url tcp://{address}:{port}: {str(error).splitlines()[0]} (machine 0 opens it; with torchrun it is "
            "MASTER_ADDR and MASTER_PORT)"
        ) from None


def _join_torchrun(
    main_func: Callable[..., Any], args: tuple[object, ...], processes: int, timeout: timedelta, device: str
) -> Any:
    """Run ``main_func(*args)`` in this process, as one of torchrun's ranks.

    Args:
        main_func, args: the function and its arguments.
        processes: the number of processes on this machine that the user asked for; 1 if they left it to torchrun.
        timeout: how long a rank waits for the others.
        device: ``MODEL.DEVICE``.
    """
    rank = int(os.environ["RANK"])
    local_size = int(os.environ.setdefault("LOCAL_WORLD_SIZE", "1"))
    agent_keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if processes not in (1, local_size):
        raise ConfigError(f"--num-gpus {processes}: torchrun started {local_size} process(es) here; leave it out")
    if dist.is_torchelastic_launched():
        watch_parent(os.getppid())
    if os.environ["WORLD_SIZE"] == "1":
        return main_func(*args)
    if agent_keeps_store and is_restartable():
        raise ConfigError(
            "torchrun --max-restarts: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment. Otherwise "
            "ranks that are started again find what the earlier ones left in torchrun's store"
        )
    cuda = uses_gpus(device, local_size, "torchrun --nproc-per-node")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = _open_store(address, port, rank == 0 and not agent_keeps_store, timeout)
    from torch.distributed.elastic.multiprocessing.errors import record  # slow to import

    @record  # passes an error to torchrun, which shows the earliest one when all ranks have ended
    def run() -> Any:
        try:
            return run_rank(main_func, args, store, timeout, cuda)
        except ConfigError as error:
            first = first_failure(store)
            if first is None or first[0] == rank:  # all ranks have the same message
                print(error_text(error), end="", file=sys.stderr)
            raise SystemExit(error.exit_code) from None

    return run()


# ---------------------------------------------------------------------- what started this process


_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# The number of processes that srun or mpirun has started. Not SLURM_NTASKS, which a batch script has too.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def launched_by_torchrun() -> bool:
    """Whether torchrun, or another launcher that sets the same variables, started this process."""
    return os.environ.keys() >= {*_VARIABLES}


def check_alone() -> None:
    """Check that this process, which joins no others, was not started as one of several.

    Raises:
        ConfigError: it was, so each of them would train alone.
    """
    names = ("WORLD_SIZE",) if launched_by_torchrun() else ("WORLD_SIZE" if "RANK" in os.environ else "", *_TASKS)
    for name in names:
        if (ranks := os.environ.get(name, "")).isdigit() and int(ranks) > 1:
            missing = ", ".join(one for one in _VARIABLES if one not in os.environ)
            raise ConfigError(
                f"{name} says that this is one of {ranks} processes, and each of them would train alone"
                f"{f' (without {missing})' if missing else ', since the script has not called launch(main, 1)'}. Start "
                "one process on each machine, with --num-gpus, --num-machines, --machine-rank and --dist-url, or "
                "torchrun on each (docs/distributed.md). For separate runs, unset the variable"
            )


def check_restarts() -> None:
    """Check that a run that does not resume is not one that torchrun restarts when a process fails or a machine joins.

    Raises:
        ConfigError: it is, and each restart would begin a new run.
    """
    if dist.is_torchelastic_launched() and is_restartable():
        raise ConfigError(
            "torchrun may restart this run (--max-restarts, or machines that join): pass --resume, or "
            "train(resume=True), so that it continues from its last checkpoint, if there is one"
        )


def is_restartable() -> bool:
    """Whether torchrun, which has started this process, may start the ranks of this run again."""
    joins = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    return joins or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def uses_gpus(device: str, processes: int, option: str) -> bool:
    """Whether each of several ranks has a GPU.

    Args:
        device: ``MODEL.DEVICE``.
        processes: the number of ranks on this machine.
        option: what has set it, for messages.

    Raises:
        ConfigError: the device works in a single process only, or there are too few GPUs.
    """
    if device.startswith(("mps", "cuda:")):
        raise ConfigError(f"MODEL.DEVICE: {device} works in one process only; several need cuda or cpu")
    if device not in ("auto", "cuda") or not torch.cuda.is_available():
        return False
    if processes > torch.cuda.device_count():
        raise ConfigError(
            f"{option} {processes}: this machine has {torch.cuda.device_count()} GPU(s); "
            "to train on its CPU cores set MODEL.DEVICE to cpu"
        )
    return True
