"""Saves and loads checkpoints, and loads weights of other formats into a model."""

from .checkpointer import Checkpointer, DetectionCheckpointer, PeriodicCheckpointer, unwrap_model
from .save_weights import save_weights
from .saver import CheckpointError

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DetectionCheckpointer",
    "PeriodicCheckpointer",
    "save_weights",
    "unwrap_model",
]
