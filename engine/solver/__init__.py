"""Optimizers, parameter groups, gradient clipping and learning rate schedules."""

from .build import OPTIMIZER_REGISTRY, build_optimizer
from .clipping import maybe_add_gradient_clipping
from .lr_scheduler import LRMultiplier, LRScheduler, WarmupCosineLR, WarmupMultiStepLR, WarmupParamScheduler
from .param_groups import get_default_optimizer_params, reduce_param_groups
from .schedules import LR_SCHEDULER_REGISTRY, build_lr_scheduler

__all__ = [
    "LR_SCHEDULER_REGISTRY",
    "OPTIMIZER_REGISTRY",
    "LRMultiplier",
    "LRScheduler",
    "WarmupCosineLR",
    "WarmupMultiStepLR",
    "WarmupParamScheduler",
    "build_lr_scheduler",
    "build_optimizer",
    "get_default_optimizer_params",
    "maybe_add_gradient_clipping",
    "reduce_param_groups",
]
