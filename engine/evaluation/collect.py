"""Collect the outputs of all batches, of all ranks, in memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from ...config import ConfigError
from .. import comm
from ..data.transfer import move_to_device

__all__ = ["Predictions", "collect"]


@dataclass(frozen=True)
class Predictions:
    """Outputs for a whole data set, in its order.

    Attributes:
        outputs: the model's outputs, with one entry per sample.
        targets: the targets, if they were asked for.
        metrics: the results of the metrics by name, if they were asked for.
    """

    outputs: Any
    targets: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


def collect(batches: Iterable[Any], all_ranks: bool = True) -> Any:
    """Concatenate batches of tensors, arrays or lists, and dicts and tuples of these, on the CPU.

    Args:
        batches: those of this rank.
        all_ranks: whether to collect those of all ranks, which must all call this function.

    Returns:
        The batches of all ranks, in the order of the ranks; None if there are none. Dataclasses and named tuples become
        dicts.

    Raises:
        ConfigError: the batches cannot be concatenated.
    """
    parts = [_by_name(move_to_device(batch, "cpu")) for batch in batches]
    shares = comm.all_gather(parts) if all_ranks and comm.get_world_size() > 1 else [parts]
    return _join(list(chain.from_iterable(shares)))


def _by_name(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return dict(value) if isinstance(value, Mapping) else value


def _join(parts: Sequence[Any]) -> Any:
    if not parts or all(part is None for part in parts):
        return None
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _join([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        return tuple(map(_join, zip(*parts, strict=True)))
    if isinstance(first, list):
        return list(chain.from_iterable(parts))
    problem = f"they are of type {type(first).__name__}"
    try:
        if isinstance(first, torch.Tensor):
            return torch.cat(list(parts))
        if isinstance(first, np.ndarray):
            return np.concatenate(parts)
    except (RuntimeError, ValueError) as error:  # shapes that differ, or single numbers
        problem = str(error)
    raise ConfigError(f"the outputs of the batches cannot be concatenated ({problem}); read them with stream=True")
