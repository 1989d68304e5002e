"""Save the weights of a model alone."""

import os
from typing import IO, Any

import torch
from torch import nn

from ...config.files.atomic import replace_file
from ...hooks.common.models import unwrap_model
from .checkpoint_file import write_checkpoint
from .matching import plain_name
from .state import to_plain

__all__ = ["save_weights"]


def save_weights(model: nn.Module, target: "str | os.PathLike[str] | IO[bytes]") -> None:
    """Save a model's weights without optimizer, hooks and the state of a run. ``MODEL.WEIGHTS`` reads the file.

    Args:
        model: the model, wrapped for several processes or not.
        target: a path, whose file appears when it is complete; or a file that is open for writing bytes.

    Raises:
        TypeError: the state has something that is neither a tensor nor plain data.
    """
    weights = to_plain(unwrap_model(model).state_dict(), "model")
    data: dict[str, Any] = {"model": {plain_name(name): value for name, value in weights.items()}}
    if isinstance(target, str | os.PathLike):
        replace_file(os.fspath(target), lambda file: write_checkpoint(file, data))
    else:
        torch.save(data, target)
