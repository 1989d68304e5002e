"""The sharded tensors of a state: separate them from the rest, and shard whole tensors in the same way."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...hooks.common.models import optimizers_of
from ...hooks.common.tensors import shard_like

__all__ = [
    "SHARD",
    "Keys",
    "Like",
    "is_mark",
    "like_model",
    "nested",
    "shard",
    "split_shards",
    "walk",
]

SHARD = "__sharded_tensor__"
"""Marks a sharded tensor in the rest of the state."""

Keys = tuple[str, ...]
"""A place in nested dicts and lists."""

Like = Callable[[Keys, torch.Size], "DTensor | None"]
"""Returns a tensor that is sharded like the one at a place; None if that one is not sharded."""


def split_shards(state: Any) -> tuple[Any, dict[Keys, "DTensor"]]:
    """Separate the sharded tensors of a state from the rest.

    Args:
        state: plain data and tensors, in nested dicts, lists and tuples.

    Returns:
        The state with marks in place of the sharded tensors, and the tensors by their place.
    """
    shards: dict[Keys, DTensor] = {}

    def visit(keys: Keys, value: Any) -> Any:
        if isinstance(value, DTensor):
            shards[keys] = cast(DTensor, value.detach())
            return {SHARD: list(value.shape)}
        return value

    return walk(state, visit), shards


def like_model(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> Like:
    """Return how the tensors of a run's state are sharded: weights, averaged weights and optimizer state.

    Args:
        model: the model.
        optimizers: its optimizers, in the order in which their states are saved.
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    parts = [part for one in optimizers for part in optimizers_of(one)]
    numbered = [[parameter for group in part.param_groups for parameter in group["params"]] for part in parts]

    def like(keys: Keys, shape: torch.Size) -> "DTensor | None":
        # {"state": {0: {"exp_avg": ...}}}, several as {"optimizers": [{"state": ...}]}; or a weight by its name.
        of_optimizer = len(keys) >= 3 and keys[-3] == "state" and keys[-2].isdecimal()
        found: Any
        if of_optimizer:
            several = len(keys) >= 5 and keys[-5] == "optimizers" and keys[-4].isdecimal()
            own_numbers = numbered[int(keys[-4])] if several else [one for part in numbered for one in part]
            found = own_numbers[int(keys[-2])] if int(keys[-2]) < len(own_numbers) else None
        else:
            found = own.get(keys[-1])
        return found if isinstance(found, DTensor) and found.shape == shape else None

    return like


def shard(state: Any, like: Like) -> Any:
    """Shard the whole tensors of a state, which are the same on all ranks.

    Args:
        state: the content of a checkpoint of one file.
        like: how tensors are sharded in this run.
    """

    def visit(keys: Keys, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not keys:
            return value
        one = like(keys, value.shape)
        return value if one is None else shard_like(value, one)

    return walk(state, visit)


def is_mark(value: Any) -> bool:
    """Return whether a value stands for a sharded tensor."""
    return isinstance(value, dict) and value.keys() == {SHARD}


def walk(value: Any, visit: Callable[[Keys, Any], Any], keys: Keys = ()) -> Any:
    """Copy nested data, with ``visit(place, value)`` in place of each value that it changes."""
    new = visit(keys, value)
    if new is not value:
        return new
    if is_mark(value):
        return value
    if isinstance(value, dict):
        return {key: walk(item, visit, (*keys, str(key))) for key, item in value.items()}
    if type(value) in (list, tuple):
        # Skip long lists of numbers, such as a generator's state.
        if all(type(item) in (int, float, str, bool) for item in value):
            return value
        return type(value)(walk(item, visit, (*keys, str(index))) for index, item in enumerate(value))
    return value


def nested(flat: Mapping[Keys, Any]) -> dict[str, Any]:
    """Build nested dicts, which DCP flattens to places."""
    tree: dict[str, Any] = {}
    for (*parents, last), value in flat.items():
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return tree
