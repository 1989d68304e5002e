"""Strategies that train one model on several processes: DDP, FSDP2 and meshes."""

from typing import TYPE_CHECKING, Any

from .base import DDP, STRATEGY_REGISTRY, Strategy, build_strategy

if TYPE_CHECKING:
    from .fsdp import FSDP2
    from .mesh import Mesh

__all__ = ["DDP", "FSDP2", "STRATEGY_REGISTRY", "Mesh", "Strategy", "build_strategy"]


def __getattr__(name: str) -> Any:
    if name in ("FSDP2", "Mesh"):
        from . import mesh

        return getattr(mesh, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
