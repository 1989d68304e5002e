"""Build the learning rate schedule of a config."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from fvcore.common.param_scheduler import ParamScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...config import CfgNode, ConfigError, Duration, get_cfg
from ...config.slots import Slot
from ...config.values import kind_of
from ...hooks.common.models import TimmScheduler
from ...hooks.evaluation import names_function
from .lr_scheduler import LRMultiplier, WarmupParamScheduler
from .parts import has_interval, solver_parts
from .run_values import clock_of, has_run_values, resolve_run_values
from .schedules import LR_SCHEDULER_REGISTRY
from .several import OptimizerList, SchedulerList

__all__ = ["build_lr_scheduler", "check_scheduler", "plateau_metric", "resolve_schedule"]

logger = logging.getLogger(__name__)

SCHEDULE_SLOT = Slot(LR_SCHEDULER_REGISTRY, "SOLVER.LR_SCHEDULER_NAME")
SCHEDULER_SLOT = Slot(LR_SCHEDULER_REGISTRY, "SOLVER.LR_SCHEDULER_NAME", offers=(), positional=1)
"""For torch's and timm's schedulers, and functions ``(optimizer, ...)`` that return one."""


def build_lr_scheduler(cfg: CfgNode, optimizer: Optimizer | OptimizerList) -> Any:
    """Build the learning rate schedule of ``cfg.SOLVER``. Call its ``step()`` once after each update.

    torch's schedulers may count something else (``SOLVER.LR_SCHEDULER_INTERVAL``), and timm's have their own calls: the
    hook :class:`~hookline.hooks.LRScheduler` makes them.

    Args:
        cfg: the whole config, with ``MAX_ITER``, ``WARMUP_ITERS`` and ``STEPS`` in iterations.
        optimizer: the optimizer whose learning rates the schedule sets. For an ``OptimizerList`` the result is a
            ``SchedulerList``, with the schedules of ``SOLVER.OPTIMIZERS`` or the same one for all.

    Raises:
        ConfigError: a length is not a number of iterations, or name or arguments are wrong.
    """
    if isinstance(optimizer, OptimizerList):
        parts = solver_parts(cfg)
        named = optimizer.named.items()
        return SchedulerList({name: build_lr_scheduler(parts.get(name, cfg), one) for name, one in named})
    cfg = resolve_schedule(cfg)
    solver = cfg.SOLVER
    for name, value in (("MAX_ITER", solver.MAX_ITER), ("WARMUP_ITERS", solver.WARMUP_ITERS)):
        _check_iterations(name, value)
    for i, step in enumerate(solver.STEPS):
        _check_iterations(f"STEPS[{i}]", step)
    if check_scheduler(cfg) is SCHEDULER_SLOT:
        mode = {"mode": cfg.CHECKPOINT.BEST.MODE} if not solver.LR_SCHEDULER_METRIC and plateau_metric(cfg) else {}
        scheduler = SCHEDULER_SLOT.try_build(cfg, optimizer, **mode)
        _warn_of_unused(cfg, scheduler, has_warmup=False)
        return scheduler
    schedule = SCHEDULE_SLOT.build(cfg)
    if not isinstance(schedule, ParamScheduler):
        raise ConfigError(
            f"SOLVER.LR_SCHEDULER_NAME: {solver.LR_SCHEDULER_NAME!r} must be a torch LRScheduler class, or return a "
            f"fvcore ParamScheduler; it returned {schedule!r}"
        )
    _warn_of_unused(cfg, schedule, has_warmup=not getattr(schedule, "has_warmup", False))
    if getattr(schedule, "has_warmup", False):
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


def resolve_schedule(
    cfg: CfgNode, iters_per_epoch: int | None = None, iterations: Callable[[Any], int] | None = None
) -> CfgNode:
    """Return a config with numbers in ``LR_SCHEDULER_ARGS``, see :func:`resolve_run_values`.

    Args:
        cfg: the config. It is returned itself if there is nothing to resolve.
        iters_per_epoch: iterations in an epoch; None if unknown.
        iterations: converts a duration to iterations. Default: by ``iters_per_epoch``.
    """
    name, args = cfg.SOLVER.LR_SCHEDULER_NAME, cfg.SOLVER.LR_SCHEDULER_ARGS
    if not args:
        return cfg
    target = LR_SCHEDULER_REGISTRY.get(name, "SOLVER.LR_SCHEDULER_NAME") if name else None
    if not has_run_values(args, target):
        return cfg
    clock = clock_of(cfg, kind_of(target))
    resolved = cfg.clone()
    resolved.defrost()
    values = resolve_run_values(cfg, target, clock, iters_per_epoch, iterations)
    resolved.SOLVER.LR_SCHEDULER_ARGS.update(values)
    if cfg.is_frozen():
        resolved.freeze()
    return resolved


def check_scheduler(cfg: CfgNode) -> Slot:
    """Check the schedule's settings and return the slot to build it from.

    Raises:
        ConfigError: name or arguments are wrong, or a key does not fit the scheduler.
    """
    cfg = resolve_schedule(cfg, 1, lambda value: 1)  # to check the arguments' types; the data is not known yet
    name = cfg.SOLVER.LR_SCHEDULER_NAME
    target = kind_of(LR_SCHEDULER_REGISTRY.get(name, "SOLVER.LR_SCHEDULER_NAME"))
    slot = SCHEDULER_SLOT if _takes_optimizer(target) else SCHEDULE_SLOT
    slot.check(cfg)
    metric, by_metric = plateau_metric(cfg), _is_a(target, ReduceLROnPlateau)
    plateau = "torch.optim.lr_scheduler:ReduceLROnPlateau"
    if getattr(target, "__name__", "") == "PlateauLRScheduler":
        raise ConfigError(f"SOLVER.LR_SCHEDULER_NAME: timm's {name!r} cannot be resumed; use {plateau!r}")
    if by_metric and not metric:
        raise ConfigError(
            f'SOLVER.LR_SCHEDULER_METRIC: {name!r} needs the name of a metric, such as "digits_test/loss"; its default '
            "is CHECKPOINT.BEST.METRIC, which is empty too"
        )
    if names_function(metric):
        raise ConfigError(f"SOLVER.LR_SCHEDULER_METRIC: {name!r} needs the name of a metric, not the function {metric}")
    if cfg.SOLVER.LR_SCHEDULER_INTERVAL == "evaluation" and not Duration.parse(cfg.TEST.EVAL_PERIOD):
        raise ConfigError(
            'TEST.EVAL_PERIOD: is 0, so SOLVER.LR_SCHEDULER_INTERVAL "evaluation" has no effect; set it, for example '
            'to "1ep"'
        )
    return slot


def plateau_metric(cfg: CfgNode) -> str:
    """The metric of ReduceLROnPlateau: LR_SCHEDULER_METRIC, or by default that of CHECKPOINT.BEST. Empty: none."""
    name = cfg.SOLVER.LR_SCHEDULER_NAME
    if not name or name in LR_SCHEDULER_REGISTRY:
        return ""
    by_metric = _is_a(kind_of(LR_SCHEDULER_REGISTRY.get(name, "SOLVER.LR_SCHEDULER_NAME")), ReduceLROnPlateau)
    return (cfg.SOLVER.LR_SCHEDULER_METRIC or cfg.CHECKPOINT.BEST.METRIC) if by_metric else ""


def _takes_optimizer(target: Any) -> bool:
    """Return whether the target is a scheduler's class, or a function whose first parameter is the optimizer."""
    if isinstance(target, type):
        return issubclass(target, LRScheduler | TimmScheduler)
    return next(iter(inspect.signature(target).parameters), "") == "optimizer"


def _warn_of_unused(cfg: CfgNode, scheduler: Any, has_warmup: bool) -> None:
    """Log keys of SOLVER that the schedule does not use, such as those of a base config for another schedule."""
    solver, defaults = cfg.SOLVER, get_cfg().SOLVER
    used = {
        "WARMUP_ITERS": has_warmup or not solver.WARMUP_ITERS,
        "LR_SCHEDULER_METRIC": isinstance(scheduler, ReduceLROnPlateau),
        "LR_SCHEDULER_INTERVAL": has_interval(scheduler),
    }
    for key, is_used in used.items():
        if not is_used and solver[key] != defaults[key]:
            name = solver.LR_SCHEDULER_NAME
            logger.warning("SOLVER.%s: %r has no effect on the schedule %s (see its ARGS)", key, solver[key], name)


def _check_iterations(name: str, value: Any) -> None:
    least = 1 if name == "MAX_ITER" else 0
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"SOLVER.{name} is {value!r}: it must be a number of iterations, {least} or more "
            "(DefaultTrainer converts epochs with the length of the loader)"
        )


def _is_a(target: Any, base: type) -> bool:
    return isinstance(target, type) and issubclass(target, base)
