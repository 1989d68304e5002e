"""Build the optimizer of a config."""

import inspect
import logging
from collections.abc import Container
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...config import CfgNode, ConfigError, Registry, suggest
from ...config.components import ComponentKey
from ...config.values import ObjectName, kind_of
from ...hooks.common import is_sharded, start_momentum
from .clipping import maybe_add_gradient_clipping
from .multi_optimizer import OptimizerList, parameters_of_parts, solver_parts
from .param_groups import (
    Group,
    apply_param_rules,
    full_config,
    get_default_optimizer_params,
    warn_of_unused,
)
from .param_groups import reduce_param_groups as reduce_param_groups  # detectron2 has it and the schedules here
from .schedules import build_lr_scheduler as build_lr_scheduler

logger = logging.getLogger(__name__)

OPTIMIZER_REGISTRY = Registry("OPTIMIZER", Optimizer)
"""Optimizers for ``SOLVER.OPTIMIZER.NAME``, called with parameter groups and ``SOLVER.OPTIMIZER.ARGS``."""

OPTIMIZER_KEY = ComponentKey(
    OPTIMIZER_REGISTRY,
    "SOLVER.OPTIMIZER.NAME",
    offers=("cfg", "lr", "weight_decay", "momentum", "nesterov", "fused"),
    positional=1,
)

for _optimizer in vars(torch.optim).values():
    if isinstance(_optimizer, type) and issubclass(_optimizer, Optimizer) and _optimizer is not Optimizer:
        OPTIMIZER_REGISTRY.register(_optimizer)

FUSED = {
    "cpu": (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad),  # Adam includes its subclass AdamW
    "cuda": (torch.optim.SGD, torch.optim.Adam),  # Adagrad only in newer versions of torch
}
"""Optimizers with a fused step on a device, which is two to four times as fast."""


def build_optimizer(cfg: CfgNode, model: nn.Module) -> Any:
    """Build the optimizer of ``cfg.SOLVER`` for the trainable parameters of a model.

    Keys that a config of detectron2's lacks have their defaults.

    With ``SOLVER.OPTIMIZERS`` the result is an :class:`~hookline.engine.solver.OptimizerList`.

    Arguments that ``OPTIMIZER.ARGS`` does not set come from the other keys of ``SOLVER``. The fused implementation is
    used where the optimizer has one for the device, unless ``ARGS`` selects an implementation or the fused step cannot
    update sharded parameters (FSDP2). If ``CLIP_GRADIENTS`` is enabled, ``step`` clips the gradients of its optimizer;
    a trainer's step clips those of all optimizers together.
    Raises:
        ConfigError: name or arguments are wrong, there is nothing to train, or the optimizer cannot update the
            parameters.
    """
    cfg = full_config(cfg)
    if cfg.SOLVER.OPTIMIZERS:
        parts = solver_parts(cfg).items()
        parameters = parameters_of_parts(cfg, model)
        return OptimizerList({name: _build_one(part, model, parameters[name]) for name, part in parts})
    name = getattr(cfg.SOLVER.OPTIMIZER, "NAME", None)
    if isinstance(name, ObjectName) and name.is_component:
        return _check_given(cfg, model, name)
    return _build_one(cfg, model)


def _check_given(cfg: CfgNode, model: nn.Module, name: ObjectName) -> Optimizer:
    """Return the optimizer that the config holds itself, in place of a name."""
    optimizer: Optimizer = name.value
    _check_optimizer(cfg)
    by = f"{name}, which has its own groups: pass its class and arguments"
    warn_of_unused(cfg, ("WEIGHT_DECAY", "PARAM_GROUPS", "BIAS_LR_FACTOR"), by)
    parameters = set(model.parameters())
    if any(map(is_sharded, parameters)):
        raise ConfigError(
            f"SOLVER.OPTIMIZER: {name} was built before the model's parameters were sharded over ranks; pass its class "
            "and arguments instead"
        )
    if not any(parameter in parameters for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            f"SOLVER.OPTIMIZER: {name} does not update any parameter of the model; build it with model.parameters() of "
            "the model that is trained"
        )
    return optimizer


def _build_one(cfg: CfgNode, model: nn.Module, only: Container[nn.Parameter] | None = None) -> Optimizer:
    """Build an optimizer for the trainable parameters of a model, or those among ``only``."""
    solver = cfg.SOLVER
    ((_, args, _),) = OPTIMIZER_KEY.entries(cfg)
    target = _check_optimizer(cfg)
    is_sgd = isinstance(target, type) and issubclass(target, torch.optim.SGD)
    decays = "weight_decay" in inspect.signature(target).parameters
    groups = get_default_optimizer_params(
        model,
        base_lr=solver.BASE_LR,
        weight_decay_norm=solver.WEIGHT_DECAY_NORM if decays else None,
        bias_lr_factor=solver.BIAS_LR_FACTOR,
        weight_decay_bias=solver.WEIGHT_DECAY_BIAS if decays else None,
    )
    if not groups:
        raise ConfigError(f"MODEL.NAME: {type(model).__name__} has no parameter that requires a gradient")
    if solver.PARAM_GROUPS:
        groups = apply_param_rules(cfg, model, groups)
    if only is not None:
        groups = [{**group, "params": [p for p in group["params"] if p in only]} for group in groups]
        groups = [group for group in groups if group["params"]]
    if getattr(target, "__name__", "") == "Adafactor" and any(map(is_sharded, model.parameters())):
        raise ConfigError(
            "SOLVER.OPTIMIZER.NAME: Adafactor cannot update parameters that are sharded over ranks (PARALLEL.NAME), as "
            "its factors need whole matrices: use AdamW, or PARALLEL.NAME ddp"
        )
    offered = {"lr": solver.BASE_LR, "weight_decay": solver.WEIGHT_DECAY}
    if is_sgd:
        offered |= {"momentum": solver.MOMENTUM, "nesterov": solver.NESTEROV}
    if not args.keys() & {"fused", "foreach", "differentiable"} and _can_fuse(target, model, groups):
        offered["fused"] = True
    optimizer: Optimizer = OPTIMIZER_KEY.build(cfg, groups, **offered)
    name = type(optimizer).__name__
    unused = []
    for key in ("MOMENTUM", "NESTEROV", "WEIGHT_DECAY"):
        if optimizer.defaults.get(key.lower()) != solver[key]:
            unused.append(key)
    warn_of_unused(cfg, unused, f"{name} with ARGS {dict(args)}")
    for group in groups if solver.PARAM_GROUPS else ():
        for setting in group.keys() - {"params", "lr", *optimizer.defaults}:
            raise ConfigError(  # torch ignores it
                f"SOLVER.PARAM_GROUPS: {name} has no setting {setting!r}"
                f"{suggest(setting, optimizer.defaults) or '.'} It has: {', '.join(optimizer.defaults)}"
            )
    if is_sgd:
        start_momentum(optimizer)
    return maybe_add_gradient_clipping(cfg, optimizer) if solver.CLIP_GRADIENTS.ENABLED else optimizer


def _can_fuse(target: Any, model: nn.Module, groups: list[Group]) -> bool:
    kinds = set()
    for group in groups:
        for parameter in group["params"]:
            kinds.add((parameter.device.type, parameter.dtype, is_sharded(parameter)))
    if len(kinds) > 1:
        return False
    for module in model.modules():
        if getattr(module, "sparse", False):
            return False
    device, dtype, sharded = kinds.pop()
    bases = torch.optim.Adam if sharded else FUSED.get(device, ())  # torch has no other one for DTensors
    return dtype.is_floating_point and isinstance(target, type) and issubclass(target, bases)


def _check_optimizer(cfg: CfgNode) -> Any:
    """Check the optimizer's settings and return its class."""
    ((name, args, _),) = OPTIMIZER_KEY.entries(cfg)
    if "lr" in args:
        raise ConfigError(
            "SOLVER.OPTIMIZER.ARGS.lr: set the learning rate with SOLVER.BASE_LR, so that the schedule knows it"
        )
    target = kind_of(OPTIMIZER_REGISTRY.get(name, "SOLVER.OPTIMIZER.NAME"))
    step = inspect.signature(target.step).parameters if isinstance(target, type) and hasattr(target, "step") else {}
    if "closure" in step and step["closure"].default is inspect.Parameter.empty:  # as torch's LBFGS
        raise ConfigError(
            f"SOLVER.OPTIMIZER.NAME: {target.__name__} calls the model several times in a step, through a closure, and "
            "a trainer's step calls it once: use another optimizer, or override run_step() and build_optimizer()"
        )
    return target
