"""Several processes as one run: the strategies DDP, FSDP2 and mesh; how ranks start, agree and fail."""

from .base import STRATEGY_REGISTRY, Strategy
from .ddp import DDP
from .fsdp import FSDP2
from .mesh import Mesh

__all__ = ["DDP", "FSDP2", "STRATEGY_REGISTRY", "Mesh", "Strategy"]
