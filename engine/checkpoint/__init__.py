"""Saves and loads checkpoints, and loads weights of other formats into a model."""

from typing import Any

from fvcore.common.checkpoint import PeriodicCheckpointer
from torch import nn

from ...config import ConfigError
from ...hooks.common import has_shards
from .checkpointer import Checkpointer, DetectionCheckpointer
from .files import CheckpointError
from .weights import save_weights

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DetectionCheckpointer",
    "PeriodicCheckpointer",
    "checkpointer_for",
    "save_weights",
]


def checkpointer_for(model: nn.Module, save_dir: str = "", **options: Any) -> Checkpointer:
    """Return a :class:`Checkpointer`, or for a model with sharded parameters the class that saves a folder of shards.

    Args:
        model: the model, wrapped or not.
        save_dir, **options: as for :class:`Checkpointer`. With ``optimizer``, frozen parameters that it does not have
            are left out.
    """
    if "optimizer" in options:
        if has_shards(model):
            raise ConfigError("CHECKPOINT.TRAINABLE_ONLY: is for models that are not sharded; set it to False")
        from .trainable_checkpointer import TrainableCheckpointer

        return TrainableCheckpointer(model, save_dir, **options)
    if not has_shards(model):
        return Checkpointer(model, save_dir, **options)
    from .sharded_checkpointer import ShardedCheckpointer  # imports torch.distributed.checkpoint: half a second

    return ShardedCheckpointer(model, save_dir, **options)
