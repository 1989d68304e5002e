"""Ranks and collectives: thin names over torch.distributed that also work in a single process.

The names are detectron2's. Every function may be called without a process group: there is then one rank, 0.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

__all__ = [
    "all_gather",
    "gather",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "is_main_process",
    "reduce_dict",
    "shared_random_seed",
    "synchronize",
]


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if _initialized() else 1


def get_rank() -> int:
    """Number of this process among all of them."""
    return dist.get_rank() if _initialized() else 0


def get_local_rank() -> int:
    """Number of this process on its machine (torchrun's ``LOCAL_RANK``)."""
    return int(os.environ.get("LOCAL_RANK", 0)) if _initialized() else 0


def get_local_size() -> int:
    """Number of processes on this machine (torchrun's ``LOCAL_WORLD_SIZE``)."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if _initialized() else 1


def is_main_process() -> bool:
    """True on rank 0, the one that writes files and prints."""
    return get_rank() == 0


def synchronize() -> None:
    """Wait until every rank is here."""
    if get_world_size() > 1:
        dist.barrier()


def _object_group() -> "dist.ProcessGroup | None":
    """A group for python objects: gloo's, since NCCL would move their bytes through the GPUs."""
    return _gloo_group() if dist.get_backend() == "nccl" else dist.group.WORLD


@functools.lru_cache(maxsize=1)
def _gloo_group() -> "dist.ProcessGroup":
    return dist.new_group(backend="gloo")


def all_gather(data: Any, group: "dist.ProcessGroup | None" = None) -> list[Any]:
    """Collect a picklable object from every rank.

    Args:
        data: this rank's object.
        group: the ranks taking part; all of them by default.

    Returns:
        The objects of all ranks, in rank order, on every rank.
    """
    if get_world_size() == 1:
        return [data]
    group = group or _object_group()
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, data, group=group)
    return out


def gather(data: Any, dst: int = 0, group: "dist.ProcessGroup | None" = None) -> list[Any]:
    """Collect a picklable object from every rank on rank ``dst``.

    Returns:
        On ``dst`` the objects of all ranks in rank order, elsewhere an empty list.
    """
    if get_world_size() == 1:
        return [data]
    group = group or _object_group()
    if dist.get_rank() != dst:
        dist.gather_object(data, None, dst=dst, group=group)
        return []
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object(data, out, dst=dst, group=group)
    return out


def shared_random_seed() -> int:
    """A random number that is the same on all ranks, drawn from numpy's generator of rank 0."""
    return all_gather(int(np.random.randint(2**31)))[0]


def reduce_dict(input_dict: Mapping[str, torch.Tensor], average: bool = True) -> dict[str, torch.Tensor]:
    """Sum (or average) a dict of scalar tensors over the ranks; the result is valid on rank 0.

    Args:
        input_dict: scalar tensors on one device, the same keys on every rank.
        average: divide by the number of ranks.

    Returns:
        A dict with the same keys.
    """
    world_size = get_world_size()
    if world_size == 1:
        return dict(input_dict)
    names = sorted(input_dict)  # the ranks may have built their dicts in different orders
    with torch.no_grad():
        values = torch.stack([input_dict[name] for name in names])
        dist.reduce(values, dst=0)
        if average and get_rank() == 0:
            values /= world_size
    return dict(zip(names, values, strict=True))
