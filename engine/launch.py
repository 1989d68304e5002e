"""Starting the processes of a run."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..config import ConfigError

__all__ = ["DEFAULT_TIMEOUT", "launch"]

DEFAULT_TIMEOUT = timedelta(minutes=30)


def launch(
    main_func: Callable[..., Any],
    num_gpus_per_machine: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: tuple[Any, ...] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Any:
    """Run ``main_func(*args)`` in each process of the run, with detectron2's arguments.

    Args:
        main_func: the function.
        num_gpus_per_machine: processes on each machine.
        num_machines: number of machines.
        machine_rank: number of this one.
        dist_url: address of machine 0, or "auto" on a single machine.
        args: arguments of ``main_func``.
        timeout: how long a rank waits for the others.

    Returns:
        What ``main_func`` returns.

    Raises:
        ConfigError: more than one process is asked for, which this version cannot do.
    """
    if num_gpus_per_machine < 1 or num_machines < 1:
        raise ConfigError(f"--num-gpus {num_gpus_per_machine} --num-machines {num_machines}: each must be at least 1")
    if not 0 <= machine_rank < num_machines:
        raise ConfigError(f"--machine-rank {machine_rank}: must be from 0 to {num_machines - 1} (--num-machines - 1)")
    world_size = num_machines * num_gpus_per_machine
    if world_size > 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            f"--num-gpus {num_gpus_per_machine} --num-machines {num_machines}: this version of hookline trains in "
            "one process; use --num-gpus 1 and --num-machines 1, without torchrun"
        )
    return main_func(*args)
