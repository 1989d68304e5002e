"""Strategies that train one model on several processes: DDP, FSDP2 and meshes."""

from typing import TYPE_CHECKING

from ...config.rare_names import imported_when_used
from .base import DDP, STRATEGY_REGISTRY, Strategy, build_strategy

if TYPE_CHECKING:
    from .fsdp import FSDP2
    from .mesh import Mesh

__all__ = ["DDP", "FSDP2", "STRATEGY_REGISTRY", "Mesh", "Strategy", "build_strategy"]

__getattr__ = imported_when_used(__name__, {"FSDP2": ".fsdp", "Mesh": ".mesh"})
