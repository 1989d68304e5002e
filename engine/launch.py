"""Starts the processes of a run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist

from ..config import ConfigError
from . import comm
from .ranks.environment import check_alone, launched_by_torchrun, uses_gpus

__all__ = ["DEFAULT_TIMEOUT", "launch", "launched_by_torchrun"]

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others."""


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
    - Several processes: they are started on this machine, each with its own GPU if there are any, and join a process
      group (NCCL for tensors on GPUs, gloo for the rest).
    - Several machines: each calls this with the same arguments, except for ``machine_rank``.
    - Under torchrun nothing is started: this process joins the others.
    - In a process that belongs to a process group already, the function is called here, as one of its ranks.

    If one process fails, all end within about ten seconds, and the first failure is raised here. Signals are passed on
    to the processes. A function of a notebook or of ``python -c`` runs in forked processes, which cannot use CUDA
    if this process has used it. Any other function, and its arguments, must be picklable, and the script needs
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
        torch.multiprocessing.ProcessRaisedException: a rank raised another exception, or hung; the message has its
            traceback or stack.
        torch.multiprocessing.ProcessExitedException: a rank was killed, or left before the others.
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
        from .ranks.process import join_torchrun

        return join_torchrun(main_func, args, num_gpus_per_machine, timeout, device)
    if num_gpus_per_machine < 1 or num_machines < 1:
        raise ConfigError(f"--num-gpus {num_gpus_per_machine} --num-machines {num_machines}: each must be at least 1")
    if not 0 <= machine_rank < num_machines:
        raise ConfigError(f"--machine-rank {machine_rank}: must be from 0 to {num_machines - 1} (--num-machines - 1)")
    world_size = num_machines * num_gpus_per_machine
    if num_machines == 1:
        check_alone()
    if world_size == 1:
        return main_func(*args)
    cuda = uses_gpus(device, num_gpus_per_machine, "--num-gpus")
    from .ranks.local_ranks import run_local_ranks

    address, port = _address(dist_url, num_machines)
    here = range(machine_rank * num_gpus_per_machine, (machine_rank + 1) * num_gpus_per_machine)
    with _open_store(address, port, machine_rank, timeout) as store:
        return run_local_ranks(main_func, args, store, address, here, world_size, timeout, cuda)


def _address(dist_url: str | None, machines: int) -> tuple[str, int]:
    """Host and port of the store; port 0 stands for any free port."""
    if dist_url in (None, "", "auto"):
        if machines > 1:
            raise ConfigError(
                "--dist-url: several machines need the address of machine 0, such as tcp://10.0.0.1:29500"
            )
        return "127.0.0.1", 0
    url = urlparse(dist_url)
    try:
        host, port = url.hostname, url.port
    except ValueError:  # the port is not a number
        host = port = None
    if url.scheme != "tcp" or not host or not port:
        raise ConfigError(f"--dist-url {dist_url}: write it as tcp://host:port, such as tcp://10.0.0.1:29500")
    return host, port


@contextmanager
def _open_store(address: str, port: int, machine_rank: int, timeout: timedelta) -> Iterator[dist.TCPStore]:
    """Open the store in which all ranks meet. Machine 0's launcher keeps it, so it outlives all ranks.

    At the end machine 0 waits some seconds for the launchers of other machines, which read the first failure there.
    """
    from .ranks.failures import ends_without_answer
    from .ranks.local_ranks import GRACE

    try:
        store = dist.TCPStore(address, port, is_master=machine_rank == 0, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        what = (
            "cannot be opened here"
            if machine_rank == 0
            else f"did not answer within {timeout.total_seconds():g} s (PARALLEL.TIMEOUT); start machine 0 as well"
        )
        raise ConfigError(f"--dist-url tcp://{address}:{port} {what} ({str(error).splitlines()[0]})") from None
    store.add("hookline/launchers", 1)
    try:
        yield store
    finally:
        with suppress(RuntimeError), ends_without_answer("the launcher"):  # RuntimeError: machine 0 has ended
            left, end = store.add("hookline/launchers", -1), time.monotonic() + GRACE + 2
            while machine_rank == 0 and left and time.monotonic() < end:
                time.sleep(0.02)
                left = store.add("hookline/launchers", 0)
