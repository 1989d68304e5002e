"""Evaluating on several ranks: whose outputs count, and models that need all ranks for each forward pass."""

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import nn

from ...hooks.common.tensors import is_sharded
from .. import comm

__all__ = ["counted", "in_step", "needs_all_ranks"]


def counted(model: Any, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """The batches that this rank runs the model on, and whether their outputs count.

    They do not where another rank needs this one's forward pass only (see :func:`in_step`), nor on ranks that share
    their batch with an earlier one: each sample counts once.

    Args:
        model: what is run.
        batches: this rank's.
    """
    is_first = comm.is_first_of_data_rank()
    for batch, counts in in_step(batches) if needs_all_ranks(model) else zip(batches, repeat(True)):
        yield batch, counts and is_first


def needs_all_ranks(model: Any) -> bool:
    """Whether the model's forward pass gathers parameters from other ranks (FSDP2)."""
    if comm.get_world_size() == 1 or not isinstance(model, nn.Module):
        return False
    return any(map(is_sharded, model.parameters()))


def in_step(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """This rank's batches and, as long as another rank has more, one of them again.

    Before each batch the ranks tell each other who has one.

    Args:
        batches: this rank's, of any number.

    Returns:
        Pairs of a batch and whether it counts: of one that does not, the outputs are to be thrown away.
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
