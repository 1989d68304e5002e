"""Strategies that train one model on several processes: DDP and FSDP2."""

from .base import DDP, STRATEGY_REGISTRY, Strategy, build_strategy

__all__ = ["DDP", "STRATEGY_REGISTRY", "Strategy", "build_strategy"]
