"""Strategies that train one model on several processes: DDP and FSDP2."""

from .base import DDP, STRATEGY_REGISTRY, Strategy, build_strategy
from .fsdp import FSDP2

__all__ = ["DDP", "FSDP2", "STRATEGY_REGISTRY", "Strategy", "build_strategy"]
