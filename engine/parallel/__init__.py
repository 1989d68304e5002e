"""Strategies that train one model on several processes: DDP, FSDP2 and meshes."""

from .base import STRATEGY_REGISTRY, Strategy, build_strategy
from .ddp import DDP
from .fsdp import FSDP2
from .mesh import Mesh

__all__ = ["DDP", "FSDP2", "STRATEGY_REGISTRY", "Mesh", "Strategy", "build_strategy"]
