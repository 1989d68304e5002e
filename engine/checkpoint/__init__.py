"""Saves and loads checkpoints, and loads weights of other formats into a model."""

from .checkpointer import (
    Checkpointer,
    CheckpointError,
    DetectionCheckpointer,
    PeriodicCheckpointer,
    checkpointer_for,
    save_weights,
    unwrap_model,
)

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DetectionCheckpointer",
    "PeriodicCheckpointer",
    "checkpointer_for",
    "save_weights",
    "unwrap_model",
]
