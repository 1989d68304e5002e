"""Strategies that train one model on several processes: DDP, FSDP2 and meshes."""

from .base import DDP, STRATEGY_REGISTRY, Strategy, build_strategy
from .fsdp import FSDP2
from .mesh import Mesh

__all__ = ["DDP", "FSDP2", "STRATEGY_REGISTRY", "Mesh", "Strategy", "build_strategy"]
