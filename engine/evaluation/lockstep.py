"""Evaluation on several ranks: which outputs count, and models whose forward pass needs all ranks."""

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import nn

from ...hooks.common.tensors import has_shards
from .. import comm

__all__ = ["counted", "in_step", "needs_all_ranks"]


def counted(model: Any, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield the batches to run the model on, and whether their outputs count. Each sample counts once.

    Outputs do not count in extra forward passes for other ranks (see :func:`in_step`), and on ranks that share their
    batch with an earlier rank.

    Args:
        model: the model to run.
        batches: batches of this rank.
    """
    is_first = comm.is_first_of_data_rank()
    for batch, counts in in_step(batches) if needs_all_ranks(model) else zip(batches, repeat(True)):
        yield batch, counts and is_first


def needs_all_ranks(model: Any) -> bool:
    """Whether the model's forward pass gathers parameters from other ranks (FSDP2)."""
    if comm.get_world_size() == 1 or not isinstance(model, nn.Module):
        return False
    return has_shards(model)


def in_step(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield this rank's batches, then repeat one of them while another rank has more.

    The ranks exchange before each batch which of them have one.

    Args:
        batches: batches of this rank, any number.

    Returns:
        Pairs of a batch and whether it counts. Discard the outputs of the others.
    """
    own = iter(batches)
    last: Any = None
    have_any = False
    while True:
        try:
            batch, counts = next(own), True
            last, have_any = batch, True
        except StopIteration:
            batch, counts = last, False
        # 2: has a batch that counts, 1: could repeat one, 0: has none at all.
        states: list[int] = comm.all_gather(2 if counts else int(have_any))
        if 2 not in states:
            return
        if 0 in states:  # a rank without any share of the data works on another's
            lent = comm.broadcast_object(_to_cpu(batch) if counts else None, src=states.index(2))
            if states[comm.get_rank()] == 0:
                last, have_any, batch = lent, True, lent
        yield batch, counts


def _to_cpu(batch: Any) -> Any:
    from ..data.transfer import move_to_device

    return move_to_device(batch, torch.device("cpu"))
