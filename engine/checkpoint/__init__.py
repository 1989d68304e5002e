"""Checkpoints: how a run's state gets to the disk and back, and weights of any origin into a model."""

from .checkpointer import Checkpointer, DetectionCheckpointer, PeriodicCheckpointer, unwrap_model
from .saver import CheckpointError

__all__ = ["CheckpointError", "Checkpointer", "DetectionCheckpointer", "PeriodicCheckpointer", "unwrap_model"]
