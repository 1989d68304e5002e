"""From a config to an optimizer and its learning rate schedule."""

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fvcore.common.param_scheduler import ParamScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...config import CfgNode, ConfigError, Registry, get_cfg
from ...hooks.models import random_numbers_left_alone
from .clipping import build_grad_clipper, maybe_add_gradient_clipping
from .lr_scheduler import LRMultiplier, WarmupParamScheduler
from .param_groups import get_default_optimizer_params
from .schedules import LR_SCHEDULER_REGISTRY

__all__ = ["OPTIMIZER_REGISTRY", "build_lr_scheduler", "build_optimizer", "check_solver", "maybe_add_gradient_clipping"]

logger = logging.getLogger(__name__)

OPTIMIZER_REGISTRY = Registry("OPTIMIZER", Optimizer)
"""Optimizers for ``SOLVER.OPTIMIZER.NAME``; called with parameter groups and ``SOLVER.OPTIMIZER.ARGS``."""

for _optimizer in (
    torch.optim.SGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
):
    OPTIMIZER_REGISTRY.register(_optimizer)

FUSED = {
    torch.optim.SGD: ("cpu", "cuda"),
    torch.optim.Adam: ("cpu", "cuda"),  # and with it AdamW, its subclass
    torch.optim.Adagrad: ("cpu",),  # on cuda only newer versions of torch have it
}
"""Devices on which an optimizer has a fused step, two to four times as fast."""

OFFERED = ("cfg", "lr", "weight_decay", "momentum", "nesterov", "fused")
"""What an optimizer may get from other keys than ``SOLVER.OPTIMIZER.ARGS``."""


def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """The optimizer ``cfg.SOLVER`` describes, for the parameters of a model that are not frozen.

    ``OPTIMIZER.ARGS`` win over the keys beside it. Where the optimizer and the device have a fused step it is used,
    unless ``ARGS`` chooses an implementation, or ranks hold shards of the parameters (FSDP2) that the fused step cannot
    update. Gradients are not clipped here: see ``build_grad_clipper``. Where parameters are sharded, every rank must
    call this.

    Raises:
        ConfigError: name or arguments are wrong, a key is set that the optimizer has no use for, there is nothing to
            train, or the optimizer cannot update sharded parameters.
    """
    solver = cfg.SOLVER
    args = dict(solver.OPTIMIZER.ARGS)
    _check_optimizer(cfg)
    target = OPTIMIZER_REGISTRY.get(solver.OPTIMIZER.NAME)
    decays = _takes(target, "weight_decay")
    groups = get_default_optimizer_params(
        model,
        base_lr=solver.BASE_LR,
        weight_decay_norm=solver.WEIGHT_DECAY_NORM if decays else None,
        bias_lr_factor=solver.BIAS_LR_FACTOR,
        weight_decay_bias=solver.WEIGHT_DECAY_BIAS if decays else None,
    )
    if not groups:
        raise ConfigError(f"MODEL.NAME: {type(model).__name__} has no parameter that requires a gradient")
    offered = {"cfg": cfg, "lr": solver.BASE_LR, "weight_decay": solver.WEIGHT_DECAY}
    if _is_a(target, torch.optim.SGD):
        offered |= {"momentum": solver.MOMENTUM, "nesterov": solver.NESTEROV}
    if not args.keys() & {"fused", "foreach", "differentiable"} and _can_fuse(target, model, groups):
        offered["fused"] = True
    offered = {name: value for name, value in offered.items() if name not in args}

    def build(groups: list[dict[str, Any]], **options: Any) -> Optimizer:
        name, key = solver.OPTIMIZER.NAME, "SOLVER.OPTIMIZER.ARGS"
        optimizer: Optimizer = OPTIMIZER_REGISTRY.build(name, args, positional=(groups,), offered=options, key=key)
        return optimizer

    if any(_is_sharded(parameter) for group in groups for parameter in group["params"]):
        with random_numbers_left_alone(model):
            if offered.get("fused") and _try_sharded(partial(build, **offered), groups) is not None:
                del offered["fused"]
            error = _try_sharded(partial(build, **offered), groups)
        if error is not None:
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise ConfigError(
                f"SOLVER.OPTIMIZER: {solver.OPTIMIZER.NAME} with ARGS {dict(args)} cannot update parameters that are "
                f"sharded over ranks ({type(error).__name__}: {reason}); use another optimizer, such as "
                'AdamW, or set PARALLEL.NAME to "ddp"'
            )
    return build(groups, **offered)


def build_lr_scheduler(cfg: CfgNode, optimizer: Optimizer) -> LRScheduler:
    """The schedule ``cfg.SOLVER`` describes: step it once after each update.

    Args:
        cfg: the whole config, its ``MAX_ITER``, ``WARMUP_ITERS`` and ``STEPS`` resolved to iterations.
        optimizer: whose learning rates it sets.

    Raises:
        ConfigError: a length is not a number of iterations, or name or arguments are wrong.
    """
    solver = cfg.SOLVER
    for name, value in (("MAX_ITER", solver.MAX_ITER), ("WARMUP_ITERS", solver.WARMUP_ITERS)):
        _check_iterations(name, value)
    for i, step in enumerate(solver.STEPS):
        _check_iterations(f"STEPS[{i}]", step)
    _check_scheduler(cfg)
    name, args = solver.LR_SCHEDULER_NAME, solver.LR_SCHEDULER_ARGS
    if _is_a(LR_SCHEDULER_REGISTRY.get(name), LRScheduler):
        _check_no_warmup(cfg)
        try:
            return LR_SCHEDULER_REGISTRY.build(name, args, positional=(optimizer,), key="SOLVER.LR_SCHEDULER_ARGS")
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"SOLVER.LR_SCHEDULER_ARGS of {name}: {error}") from error
    schedule = LR_SCHEDULER_REGISTRY.build(name, args, offered={"cfg": cfg}, key="SOLVER.LR_SCHEDULER_ARGS")
    if not isinstance(schedule, ParamScheduler):
        raise ConfigError(
            f"SOLVER.LR_SCHEDULER_NAME: {name!r} must be a torch LRScheduler class, or return a fvcore ParamScheduler; "
            f"it returned {schedule!r}"
        )
    if getattr(schedule, "has_warmup", False):
        _check_no_warmup(cfg)
        return LRMultiplier(optimizer, schedule, solver.MAX_ITER)
    if solver.WARMUP_ITERS >= solver.MAX_ITER:
        logger.warning(
            "SOLVER.WARMUP_ITERS (%d) is not less than MAX_ITER (%d): the whole run is warm-up",
            solver.WARMUP_ITERS,
            solver.MAX_ITER,
        )
    try:
        schedule = WarmupParamScheduler(
            schedule,
            solver.WARMUP_FACTOR,
            min(solver.WARMUP_ITERS / solver.MAX_ITER, 1.0),
            solver.WARMUP_METHOD,
            solver.RESCALE_INTERVAL,
        )
    except ValueError as error:
        raise ConfigError(f"SOLVER.WARMUP_METHOD: {error}") from error
    return LRMultiplier(optimizer, schedule, solver.MAX_ITER)


def check_solver(cfg: CfgNode) -> None:
    """Check the optimizer's, the schedule's and the clipping's names and arguments without building anything.

    Raises:
        ConfigError: the first thing wrong.
    """
    if cfg.SOLVER.OPTIMIZER.NAME:
        _check_optimizer(cfg)
    if cfg.SOLVER.LR_SCHEDULER_NAME:
        _check_scheduler(cfg)
    build_grad_clipper(cfg)


def _check_optimizer(cfg: CfgNode) -> None:
    solver, key = cfg.SOLVER, "SOLVER.OPTIMIZER.ARGS"
    name, args = solver.OPTIMIZER.NAME, solver.OPTIMIZER.ARGS
    if "lr" in args:
        raise ConfigError(f"{key}.lr: set the learning rate by SOLVER.BASE_LR, so that the schedule knows it")
    OPTIMIZER_REGISTRY.check(name, args, positional=1, offered=OFFERED, key=key)
    target = OPTIMIZER_REGISTRY.get(name)
    unused = [] if _is_a(target, torch.optim.SGD) else ["MOMENTUM", "NESTEROV"]
    if not _takes(target, "weight_decay"):
        unused += ["WEIGHT_DECAY", "WEIGHT_DECAY_NORM", "WEIGHT_DECAY_BIAS"]
    defaults = get_cfg().SOLVER
    for other in unused:
        if solver[other] != defaults[other]:
            raise ConfigError(
                f"SOLVER.{other} is {solver[other]}, but the optimizer {name!r} has no use for it: "
                f"leave it at {defaults[other]}, and give the optimizer's own arguments in {key}"
            )


def _check_scheduler(cfg: CfgNode) -> None:
    name, key = cfg.SOLVER.LR_SCHEDULER_NAME, "SOLVER.LR_SCHEDULER_ARGS"
    target = LR_SCHEDULER_REGISTRY.get(name, "SOLVER.LR_SCHEDULER_NAME")
    is_torch, by_metric = _is_a(target, LRScheduler), _is_a(target, ReduceLROnPlateau)
    LR_SCHEDULER_REGISTRY.check(
        name, cfg.SOLVER.LR_SCHEDULER_ARGS, positional=int(is_torch), offered=() if is_torch else ("cfg",), key=key
    )
    metric = cfg.SOLVER.LR_SCHEDULER_METRIC
    if metric and not by_metric:
        raise ConfigError(
            f"SOLVER.LR_SCHEDULER_METRIC: is {metric!r}, but {name!r} counts iterations: leave it empty, or use "
            '"torch.optim.lr_scheduler:ReduceLROnPlateau"'
        )
    if by_metric and not metric:
        raise ConfigError(
            f'SOLVER.LR_SCHEDULER_METRIC: {name!r} needs the name of the metric it goes by, such as "digits_test/loss"'
        )


def _check_no_warmup(cfg: CfgNode) -> None:
    if cfg.SOLVER.WARMUP_ITERS not in (0, get_cfg().SOLVER.WARMUP_ITERS):
        raise ConfigError(
            f"SOLVER.WARMUP_ITERS is {cfg.SOLVER.WARMUP_ITERS}, but {cfg.SOLVER.LR_SCHEDULER_NAME!r} is not given a "
            "warm-up: set it to 0, and shape the schedule by SOLVER.LR_SCHEDULER_ARGS"
        )


def _check_iterations(name: str, value: Any) -> None:
    least = 1 if name == "MAX_ITER" else 0
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"SOLVER.{name} is {value!r}: here it must be a number of iterations, {least} or more "
            "(DefaultTrainer resolves epochs, from the length of the loader)"
        )


def _can_fuse(target: Any, model: nn.Module, groups: list[dict[str, Any]]) -> bool:
    kinds = {(parameter.device.type, parameter.dtype) for group in groups for parameter in group["params"]}
    if len(kinds) > 1 or any(getattr(module, "sparse", False) for module in model.modules()):
        return False
    device, dtype = kinds.pop()
    devices = {device for base, devices in FUSED.items() if _is_a(target, base) for device in devices}
    return device in devices and dtype.is_floating_point


def _is_sharded(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "to_local")


def _try_sharded(build: Callable[[list[dict[str, Any]]], Optimizer], groups: list[dict[str, Any]]) -> Exception | None:
    """Step a new optimizer over copies of the smallest parameter of each kind, with gradients of 0.

    torch has no list of the operations that work on sharded tensors, so this is how to find out.

    Returns:
        What the step raised, the same on all ranks; None if it works.
    """
    smallest: dict[tuple[bool, int], torch.Tensor] = {}
    for parameter in sorted((p for group in groups for p in group["params"]), key=torch.Tensor.numel):
        smallest.setdefault((_is_sharded(parameter), parameter.ndim), parameter)
    copies = [nn.Parameter(torch.zeros_like(parameter)) for parameter in smallest.values()]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    try:
        build([{"params": copies}]).step()
    except Exception as error:
        return error
    return None


def _is_a(target: Any, base: type | tuple[type, ...]) -> bool:
    return isinstance(target, type) and issubclass(target, base)


def _takes(target: Any, name: str) -> bool:
    return name in inspect.signature(target).parameters
