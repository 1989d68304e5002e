"""Ranks and collectives: thin names over torch.distributed that also work in a single process.

The names are detectron2's. Without a process group there is one rank, 0, and every function may be called.
Objects, decisions and barriers use gloo and the store that the ranks met in, never the GPUs.
"""

import functools
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..config import ConfigError

__all__ = [
    "all_gather",
    "all_reduce_sum",
    "barrier",
    "broadcast_object",
    "create_local_process_group",
    "gather",
    "get_data_rank",
    "get_data_size",
    "get_local_process_group",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_store",
    "get_world_size",
    "is_first_of_data_rank",
    "is_main_process",
    "main_process_first",
    "new_group",
    "object_group",
    "reduce_dict",
    "set_data_ranks",
    "shared_random_seed",
    "synchronize",
    "timeout",
]


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


# ---------------------------------------------------------------------- who is there


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


# ---------------------------------------------------------------------- who shares a batch


@dataclass(frozen=True)
class _DataRanks:
    world: Any  # the default group: a new one begins with the default again
    rank: int
    size: int
    is_first: bool


_data_ranks: _DataRanks | None = None


def _of_this_world() -> _DataRanks | None:
    found = _data_ranks
    return found if found is not None and _initialized() and found.world is dist.group.WORLD else None


def get_data_rank() -> int:
    """Number of this process's share of each global batch; ranks that compute one share together have the same."""
    found = _of_this_world()
    return get_rank() if found is None else found.rank


def get_data_size() -> int:
    """Number of shares that a global batch is split into: by default one for each rank."""
    found = _of_this_world()
    return get_world_size() if found is None else found.size


def is_first_of_data_rank() -> bool:
    """True on one of the ranks that share a batch: the one whose predictions count. By default on every rank."""
    found = _of_this_world()
    return found is None or found.is_first


def set_data_ranks(rank: int, size: int) -> None:
    """Say which ranks share a batch. Samplers and loaders made afterwards, and evaluations, follow it.

    :class:`~hookline.engine.DefaultTrainer` calls it with ``data_rank`` and ``data_size`` of its strategy. Every rank
    must call it. It holds for the present process group.

    Args:
        rank: which share of each batch this process has.
        size: the number of shares.

    Raises:
        ConfigError: the ranks' numbers do not go together.
    """
    global _data_ranks
    everywhere: list[tuple[int, int]] = all_gather((rank, size))
    shares = [share for share, _ in everywhere]
    per_share = len(shares) // size if size > 0 else 0
    # Shares are numbered in the order of their first ranks: evaluations write predictions in the order of ranks.
    if {one for _, one in everywhere} != {size} or sorted(shares) != sorted([*range(size)] * per_share):
        raise ConfigError(
            f"data ranks of the strategy: the ranks' (data_rank, data_size) are {everywhere}; data_size must be the "
            "same on all, and each data_rank below it must have the same number of ranks"
        )
    if list(dict.fromkeys(shares)) != list(range(size)):
        raise ConfigError(f"data ranks of the strategy: {shares} must be numbered in the order of their first ranks")
    if _initialized():
        _data_ranks = _DataRanks(dist.group.WORLD, rank, size, shares.index(rank) == get_rank())


# ---------------------------------------------------------------------- groups


def timeout() -> timedelta:
    """How long a rank waits for the others, in a collective of any group or at a barrier: ``PARALLEL.TIMEOUT``."""
    store = get_store()
    return store.timeout if store is not None else timedelta(0)  # type: ignore[attr-defined]


def new_group(ranks: list[int] | None = None, backend: str | None = None) -> "dist.ProcessGroup":
    """Make a process group with the run's timeout; torch's own ``new_group`` has 30 minutes. Every rank must call it.

    Args:
        ranks: the members; all ranks by default.
        backend: "gloo" or "nccl"; that of the default group by default.
    """
    return dist.new_group(ranks, timeout=timeout(), backend=backend)


def create_local_process_group(num_workers_per_machine: int) -> None:
    """Make a group for the ranks of each machine, see :func:`get_local_process_group`. Every rank must call it.

    Args:
        num_workers_per_machine: processes on each machine; ranks are numbered machine by machine.
    """
    if not _initialized():
        return
    _check_local_size(num_workers_per_machine)
    _local_group(dist.group.WORLD, num_workers_per_machine)


def get_local_process_group() -> "dist.ProcessGroup | None":
    """The group of the ranks on this machine. The first call makes it, so every rank must call this.

    Returns:
        A group for collectives of tensors; None in a single process.
    """
    return _local_group(dist.group.WORLD, get_local_size()) if _initialized() else None


def _check_local_size(size: int) -> None:
    if size < 1 or get_world_size() % size:
        raise ValueError(f"{get_world_size()} ranks cannot be shared out to machines with {size} each")


@functools.lru_cache(maxsize=1)
def _local_group(world: Any, size: int) -> "dist.ProcessGroup | None":
    """This machine's group. ``world`` is part of the cache key: a new default group gets new local groups."""
    _check_local_size(size)
    mine = None
    for first in range(0, dist.get_world_size(), size):
        group = new_group(list(range(first, first + size)))
        if first <= dist.get_rank() < first + size:
            mine = group
    return mine


def object_group() -> "dist.ProcessGroup | None":
    """A gloo group for objects, decisions and metrics, separate from the group of the gradients.

    Collectives of one group must run in the same order on all ranks, and gradients are exchanged in the background.
    The first call makes the group, so every rank must make that call at the same place.
    """
    return _gloo_group(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _gloo_group(world: Any) -> "dist.ProcessGroup":
    return new_group(backend="gloo")


def get_store() -> "dist.Store | None":
    """The key-value store that the ranks met in; None in a single process."""
    return dist.distributed_c10d._get_default_store() if _initialized() else None


# ---------------------------------------------------------------------- waiting


def synchronize() -> None:
    """Wait until every rank is here."""
    if get_world_size() == 1:
        return
    if dist.get_backend() == "nccl":  # which would otherwise guess the device
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()


@functools.lru_cache(maxsize=1)
def _turns(world: Any) -> "Counter[str]":
    """How often this rank has reached each named barrier of a group."""
    return Counter()


class BarrierTimeoutError(TimeoutError):
    """Some ranks did not reach a barrier in time."""


def barrier(name: str, timeout: timedelta | float | None = None) -> None:
    """Wait until every rank has reached the barrier of this name. Unlike a collective, it names missing ranks.

    It uses the store, not the devices, and may be called on any thread.

    Args:
        name: of the place in the program; one name may be used many times.
        timeout: how long to wait, in seconds if it is a number; by default the run's :func:`timeout`.

    Raises:
        TimeoutError: some ranks did not come; the message has their numbers.
    """
    store, world_size = get_store(), get_world_size()
    if store is None or world_size == 1:
        return
    if timeout is None:
        timeout = store.timeout  # type: ignore[attr-defined]
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    turns = _turns(dist.group.WORLD)
    turns[name] += 1
    turn = turns[name]
    keys = [f"hookline/barrier/{name}/{turn}/{rank}" for rank in range(world_size)]
    store.set(keys[get_rank()], "here")
    # Polling leaves the connection to other threads; store.wait() would block it.
    end, pause = time.monotonic() + limit.total_seconds(), 0.001
    while not store.check(keys):
        if time.monotonic() > end:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise BarrierTimeoutError(
                f"barrier {name!r}: rank(s) {', '.join(missing)} did not come within {limit.total_seconds():g} s "
                f"(rank {get_rank()} waited)"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    if is_main_process() and turn > 1:  # all ranks are here, so none waits at the previous turn
        for rank in range(world_size):
            store.delete_key(f"hookline/barrier/{name}/{turn - 1}/{rank}")


@contextmanager
def main_process_first(local: bool = True, name: str = "main process first") -> Iterator[None]:
    """Run the body in the main process first, then in the others: to download data or build a cache.

    Args:
        local: the first process of each machine goes first; otherwise rank 0 alone, for folders all machines share.
        name: names the place in error messages.

    Example::

        with comm.main_process_first():
            dataset = download_and_unpack(url)
    """
    first = (get_local_rank() if local else get_rank()) == 0
    if not first:
        barrier(name)
    try:
        yield
    finally:
        if first:  # also after an error: the others must not wait for it
            barrier(name)


# ---------------------------------------------------------------------- objects


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
    group = group or object_group()
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
    group = group or object_group()
    if dist.get_rank() != dst:
        dist.gather_object(data, None, dst=dst, group=group)
        return []
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object(data, out, dst=dst, group=group)
    return out


def broadcast_object(obj: Any, src: int = 0, group: "dist.ProcessGroup | None" = None) -> Any:
    """Give every rank the picklable object of rank ``src``.

    Args:
        obj: the object; what other ranks pass is ignored.
        src: the rank it comes from.
        group: the ranks taking part; all of them by default.

    Returns:
        The object of rank ``src``.
    """
    if get_world_size() == 1:
        return obj
    box = [obj if get_rank() == src else None]
    dist.broadcast_object_list(box, src=src, group=group or object_group())
    return box[0]


def shared_random_seed() -> int:
    """A random number that is the same on all ranks, drawn from numpy's generator of rank 0."""
    return all_gather(int(np.random.randint(2**31)))[0]


# ---------------------------------------------------------------------- numbers


def all_reduce_sum(value: Any) -> Any:
    """The sum of a number over all ranks, on every rank.

    Args:
        value: an int, a float or a scalar tensor; the same kind on every rank. A tensor on a GPU stays there, and
            nobody waits for it.

    Returns:
        The sum, of the same kind.
    """
    if get_world_size() == 1:
        return value
    if not isinstance(value, torch.Tensor):
        total = torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
        dist.all_reduce(total, group=object_group())
        return total.item()
    total = value.detach().clone()
    dist.all_reduce(total, group=object_group() if total.device.type == "cpu" else None)
    return total


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
        dist.reduce(values, dst=0, group=object_group() if values.device.type == "cpu" else None)
        if average and get_rank() == 0:
            values /= world_size
    return dict(zip(names, values, strict=True))
