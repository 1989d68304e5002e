"""Ranks and collectives: short functions over torch.distributed that also work in a single process.

The names are detectron2's. Objects, decisions and barriers use gloo and the store, never the GPUs.
"""

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ..config import ConfigError

__all__ = [
    "all_gather",
    "create_local_process_group",
    "gather",
    "get_local_process_group",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "is_main_process",
    "main_process_first",
    "new_group",
    "reduce_dict",
    "set_data_ranks",
    "shared_random_seed",
    "synchronize",
]


_Object = TypeVar("_Object")


# ---------------------------------------------------------------------- ranks


def get_world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    """Return the rank of this process among all processes."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_local_rank() -> int:
    """Return the rank of this process on its machine (torchrun's ``LOCAL_RANK``)."""
    return int(os.environ.get("LOCAL_RANK", 0)) if dist.is_initialized() else 0


def get_local_size() -> int:
    """Return the number of processes on this machine (torchrun's ``LOCAL_WORLD_SIZE``)."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if dist.is_initialized() else 1


def is_main_process() -> bool:
    """Whether this is rank 0, which writes files and prints."""
    return get_rank() == 0


# ---------------------------------------------------------------------- ranks that share a batch


class _DataRanks(NamedTuple):
    rank: int
    size: int
    is_first: bool


# With the default group that they are of: a new one starts with the default values.
_set_data_ranks: tuple[object, _DataRanks] = (None, _DataRanks(0, 1, True))


def _data_ranks() -> _DataRanks:
    world, found = _set_data_ranks
    if dist.is_initialized() and world is dist.group.WORLD:
        return found
    return _DataRanks(get_rank(), get_world_size(), True)


def get_data_rank() -> int:
    """Return which share of each global batch this rank computes. Ranks that share a batch return the same number."""
    return _data_ranks().rank


def get_data_size() -> int:
    """Return the number of shares of a global batch, by default the number of ranks."""
    return _data_ranks().size


def is_first_of_data_rank() -> bool:
    """Whether this is the first of the ranks that share a batch, whose predictions count. By default always true."""
    return _data_ranks().is_first


def set_data_ranks(rank: int, size: int) -> None:
    """Set which ranks share a batch. Samplers and loaders built afterwards, and evaluations, use it.

    :class:`~hookline.engine.DefaultTrainer` calls it with ``data_rank`` and ``data_size`` of its strategy. Every rank
    must call it. It applies to the current process group.

    Args:
        rank: which share of each batch this process has.
        size: the number of shares.

    Raises:
        ConfigError: the numbers of the ranks are inconsistent.
    """
    global _set_data_ranks
    if not dist.is_initialized():
        return
    pairs: list[tuple[int, int]] = all_gather((rank, size))
    shares = [share for share, _ in pairs]
    same_size = {one for _, one in pairs} == {size} and len(set(Counter(shares).values())) == 1
    if not same_size or list(dict.fromkeys(shares)) != list(range(size)):  # the order that predictions are written in
        raise ConfigError(
            f"data ranks of the strategy: the ranks' (data_rank, data_size) are {pairs}; data_size must be the same on "
            "all, and each data_rank below it, in the order of their first ranks, must have the same number of ranks"
        )
    _set_data_ranks = dist.group.WORLD, _DataRanks(rank, size, shares.index(rank) == get_rank())


# ---------------------------------------------------------------------- groups


def timeout() -> timedelta:
    """Return how long a rank waits for the others in collectives and at barriers (``PARALLEL.TIMEOUT``)."""
    store = get_store()
    return store.timeout if store is not None else timedelta(0)  # type: ignore[attr-defined]


def new_group(ranks: list[int] | None = None, backend: str | None = None) -> "dist.ProcessGroup":
    """Create a process group with the run's timeout; torch's ``new_group`` has 30 minutes. Every rank must call it.

    Args:
        ranks: the members; all ranks by default.
        backend: "gloo" or "nccl"; by default that of the default group.
    """
    return dist.new_group(ranks, timeout=timeout(), backend=backend)


def create_local_process_group(num_workers_per_machine: int) -> None:
    """Create a group for each machine, see :func:`get_local_process_group`. Every rank must call it.

    ``num_workers_per_machine`` is the number of processes on each machine. Ranks are numbered machine by machine.
    """
    if dist.is_initialized():
        _local_group(dist.group.WORLD, num_workers_per_machine)


def get_local_process_group() -> "dist.ProcessGroup | None":
    """Return the group of the ranks on this machine, for tensors; None in a single process.

    The first call creates the group, so every rank must make it.
    """
    return _local_group(dist.group.WORLD, get_local_size()) if dist.is_initialized() else None


@functools.lru_cache(maxsize=1)
def _local_group(world: object, size: int) -> "dist.ProcessGroup | None":
    # world is part of the cache key: a new default group gets new local groups.
    return dist.new_subgroups(size, timeout=timeout())[0]


def object_group() -> "dist.ProcessGroup | None":
    """Return a gloo group for objects, decisions and metrics, separate from the group of the gradients.

    The collectives of a group must run in the same order on all ranks, and gradients are reduced in the background.
    The first call creates the group, so every rank must make it at the same place.
    """
    return _gloo_group(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _gloo_group(world: object) -> "dist.ProcessGroup":
    return new_group(backend="gloo")


def get_store() -> "dist.Store | None":
    """Return the key-value store that all ranks share; None in a single process."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


# ---------------------------------------------------------------------- waiting


def synchronize() -> None:
    """Wait until every rank calls it."""
    if get_world_size() == 1:
        return
    if dist.get_backend() == "nccl":  # NCCL would guess the device
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()


def missing_ranks(store: "dist.Store", key: str, rank: int, size: int, seconds: float) -> list[str]:
    """Wait until all processes call this with a key; return the ranks that did not call it in time.

    Args:
        store: the store.
        key: where they meet in the store.
        rank, size: of this process.
        seconds: how long to wait.
    """
    store.add(key, 1)
    store.set(f"{key}/{rank}", "here")
    # store.wait() would block the connection for other threads. Asking for one number, instead of all ranks' keys,
    # costs the store the same for each of many ranks.
    end, pause = time.monotonic() + seconds, 0.001
    while store.add(key, 0) < size:
        if time.monotonic() > end:
            return [str(one) for one in range(size) if not store.check([f"{key}/{one}"])]
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return []


@contextmanager
def main_process_first(local: bool = True) -> Iterator[None]:
    """Run the body in the main process first, then in the others, for example to download data.

    Args:
        local: run first in the first process of each machine. If False, only in rank 0, for folders that all
            machines share.
    """
    first = (get_local_rank() if local else get_rank()) == 0
    if not first:
        all_gather(None)
    try:
        yield
    finally:
        if first:  # even after an error, so that the others do not wait
            all_gather(None)


# ---------------------------------------------------------------------- objects


def all_gather(data: _Object, group: "dist.ProcessGroup | None" = None) -> list[_Object]:
    """Return a picklable object of every rank, in rank order, on every rank.

    Args:
        data: this rank's object.
        group: the ranks that take part; by default all.
    """
    if get_world_size() == 1:
        return [data]
    group = group or object_group()
    out: list[_Object] = [data] * dist.get_world_size(group)
    dist.all_gather_object(out, data, group=group)
    return out


def gather(data: _Object, dst: int = 0, group: "dist.ProcessGroup | None" = None) -> list[_Object]:
    """Return a picklable object of every rank, in rank order, on rank ``dst``; an empty list on other ranks."""
    if get_world_size() == 1:
        return [data]
    group = group or object_group()
    out: list[_Object] = [data] * dist.get_world_size(group) if dist.get_rank() == dst else []
    dist.gather_object(data, out or None, dst=dst, group=group)
    return out


def broadcast_object(obj: _Object, src: int = 0, group: "dist.ProcessGroup | None" = None) -> _Object:
    """Return rank ``src``'s object on every rank.

    Args:
        obj: a picklable object; ignored on other ranks.
        src: the rank that sends it.
        group: the ranks that take part; by default all.
    """
    if get_world_size() == 1:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=src, group=group or object_group())
    return box[0]


def on_main_process(function: Callable[[], _Object]) -> _Object:
    """Call a function on the main process. Every rank returns its result, or raises its ConfigError or OSError."""
    if get_world_size() == 1:
        return function()
    found: tuple[Any, Exception | None] = None, None
    if is_main_process():
        try:
            found = function(), None
        except (ConfigError, OSError) as error:
            found = None, error
    result, failure = broadcast_object(found)
    if failure is not None:
        raise failure
    return result


def shared_random_seed() -> int:
    """Return a random number that is the same on all ranks, drawn from numpy's generator of rank 0."""
    return all_gather(int(np.random.randint(2**31)))[0]


# ---------------------------------------------------------------------- numbers


def all_reduce_sum(value: Any) -> Any:
    """Return the sum of a number over all ranks, on every rank.

    Args:
        value: an int, a float or a scalar tensor, of the same type on every rank. A tensor on a GPU stays there,
            without synchronization.
    """
    if get_world_size() == 1:
        return value
    if not isinstance(value, torch.Tensor):
        total = torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
        dist.all_reduce(total, group=object_group())
        return total.item()
    return start_sum(value)()


def start_sum(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to sum a scalar tensor over all ranks, and return a function that waits for the sum; see
    :func:`all_reduce_sum`."""
    total = value.detach().clone()
    group = object_group() if total.device.type == "cpu" else None
    work = dist.all_reduce(total, group=group, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return total

    return wait


def reduce_dict(input_dict: Mapping[str, torch.Tensor], average: bool = True) -> dict[str, torch.Tensor]:
    """Return the mean (or sum) over the ranks of each of some scalar tensors. The result is valid on rank 0.

    Args:
        input_dict: scalar tensors on one device, the same keys on every rank.
        average: divide by the number of ranks.
    """
    world_size = get_world_size()
    if world_size == 1:
        return dict(input_dict)
    names = sorted(input_dict)  # ranks may have different orders
    with torch.no_grad():
        values = torch.stack([input_dict[name] for name in names])
        dist.reduce(values, dst=0, group=object_group() if values.device.type == "cpu" else None)
        if average and get_rank() == 0:
            values /= world_size
    return dict(zip(names, values, strict=True))
