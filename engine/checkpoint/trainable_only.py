"""Reads checkpoints of what is trained (CHECKPOINT.TRAINABLE_ONLY): adds the frozen weights that they left out."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...config import ConfigError
from ...hooks.common import plain_name

_AT_ONCE = 1 << 22  # numbers that are summed at once, for little memory
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by bytes


def bit_sums(weights: Iterable[torch.Tensor]) -> list[int]:
    """Return a sum of each weight's bits times their positions, which tells changed and exchanged weights."""
    sums = []
    for one in weights:
        total = 0
        for number, block in enumerate(one.detach().contiguous().reshape(-1).split(_AT_ONCE)):
            bits = block.view(_INTEGERS[block.element_size()]).to(torch.int64)
            positions = torch.arange(1, len(block) + 1, device=block.device)
            total += int((bits * (number * _AT_ONCE + positions)).sum())
        sums.append(total % 2**63)
    return sums


def add_frozen(checkpointer: Any, left_out: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Add the frozen weights that a file left out to those that it has.

    They are the model's. If their sums are not those in the file, they are read from the file that the run had them
    from, or else from MODEL.WEIGHTS.

    Args:
        checkpointer: the Checkpointer that loads the file.
        left_out: the file's entry of that name.
        weights: the file's weights.

    Raises:
        ConfigError: the model has other weights, and so have those files.
    """
    reader, names = copy.copy(checkpointer), left_out["names"]
    reader.base, reader.save_dir = ("", "model"), ""
    sums, problem = dict(zip(names, left_out["sums"], strict=True)), ""
    for source, weights_from in [("", "model"), *left_out["sources"], checkpointer.base]:
        try:
            if source:
                reader.load(source, [], weights_from=weights_from)
        except ConfigError as error:
            problem = problem or f" ({error})"
        there = {plain_name(name): value for name, value in checkpointer.model.state_dict().items()}
        frozen = {name: there[name] for name in names if name in there}
        if bit_sums(frozen.values()) == [sums[name] for name in frozen]:
            return {**frozen, **weights}
    read_from = " and ".join(source for source, _ in left_out["sources"]) or "the model as it was built"
    raise ConfigError(
        f"{checkpointer.loaded_from} has only the trained weights (CHECKPOINT.TRAINABLE_ONLY), and its {len(names)} "
        f"frozen ones are not those of {read_from}{problem}: put that file back, or load it into the model first; at "
        "a resume, set MODEL.WEIGHTS to it"
    )
