"""Learning rate schedules of a config.

Each entry of ``LR_SCHEDULER_REGISTRY`` takes the config and ``SOLVER.LR_SCHEDULER_ARGS``, and returns the factor of
``SOLVER.BASE_LR`` as a function of progress. ``build_lr_scheduler`` adds the warm-up.
"""

import inspect
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from fvcore.common.param_scheduler import (
    CosineParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    ParamScheduler,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as TorchScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...config import CfgNode, ConfigError, Duration, Registry
from ...config.components import Slot
from ...config.values import kind_of
from ...hooks import LRScheduler
from ...hooks.control.lr_scheduler import FunctionSchedule, LRMultiplier, TimmScheduler, WarmupParamScheduler
from ...hooks.evaluation import names_function
from .param_groups import warn_of_unused
from .several import OptimizerList, SchedulerList, solver_parts

__all__ = [
    "LR_SCHEDULER_REGISTRY",
    "SCHEDULE_SLOT",
    "build_lr_scheduler",
    "check_scheduler",
    "plateau_metric",
    "resolve_schedule",
    "scheduler_hooks",
]

logger = logging.getLogger(__name__)

LR_SCHEDULER_REGISTRY = Registry("LR_SCHEDULER", (TorchScheduler, ParamScheduler, TimmScheduler))
"""Schedules for ``SOLVER.LR_SCHEDULER_NAME``: ``(cfg, **SOLVER.LR_SCHEDULER_ARGS) -> ParamScheduler``, or torch's and
timm's schedulers: ``(optimizer, **SOLVER.LR_SCHEDULER_ARGS)``."""

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
    lengths = {"MAX_ITER": solver.MAX_ITER, "WARMUP_ITERS": solver.WARMUP_ITERS}
    for name, value in {**lengths, **{f"STEPS[{i}]": step for i, step in enumerate(solver.STEPS)}}.items():
        least = 1 if name == "MAX_ITER" else 0
        if type(value) is not int or value < least:
            raise ConfigError(
                f"SOLVER.{name} is {value!r}: it must be a number of iterations, {least} or more "
                "(DefaultTrainer converts epochs with the length of the loader)"
            )
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
    adds_warmup = not getattr(schedule, "has_warmup", False)
    _warn_of_unused(cfg, schedule, adds_warmup)
    if adds_warmup:
        if solver.WARMUP_ITERS >= solver.MAX_ITER:
            logger.warning(
                "SOLVER.WARMUP_ITERS (%d) is not less than MAX_ITER (%d): the whole run is warm-up",
                solver.WARMUP_ITERS,
                solver.MAX_ITER,
            )
        length = min(solver.WARMUP_ITERS / solver.MAX_ITER, 1.0)
        try:
            schedule = WarmupParamScheduler(
                schedule, solver.WARMUP_FACTOR, length, solver.WARMUP_METHOD, solver.RESCALE_INTERVAL
            )
        except ValueError as error:
            raise ConfigError(f"SOLVER.WARMUP_METHOD: {error}") from error
    return LRMultiplier(optimizer, schedule, solver.MAX_ITER)


def resolve_schedule(
    cfg: CfgNode, iters_per_epoch: int | None = None, iterations: Callable[[Any], int] | None = None
) -> CfgNode:
    """Return a config with numbers for durations and names of values in ``LR_SCHEDULER_ARGS``.

    Args:
        cfg: the config. It is returned itself if there is nothing to resolve.
        iters_per_epoch: iterations in an epoch; None if unknown.
        iterations: converts a duration to iterations. Default: by ``iters_per_epoch``.
    """
    name, args = cfg.SOLVER.LR_SCHEDULER_NAME, cfg.SOLVER.LR_SCHEDULER_ARGS
    if not args:
        return cfg
    from .run_values import resolve_run_values

    target = LR_SCHEDULER_REGISTRY.get(name, "SOLVER.LR_SCHEDULER_NAME") if name else None
    values = resolve_run_values(cfg, target, iters_per_epoch, iterations)
    if values == dict(args):
        return cfg
    resolved = cfg.clone()
    resolved.defrost()
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
    name, metric = cfg.SOLVER.LR_SCHEDULER_NAME, plateau_metric(cfg)
    target = kind_of(LR_SCHEDULER_REGISTRY.get(name, "SOLVER.LR_SCHEDULER_NAME"))
    if isinstance(target, type):
        takes_optimizer = issubclass(target, TorchScheduler | TimmScheduler)
    else:  # a function whose first parameter is the optimizer
        takes_optimizer = next(iter(inspect.signature(target).parameters), "") == "optimizer"
    slot = SCHEDULER_SLOT if takes_optimizer else SCHEDULE_SLOT
    slot.check(cfg)
    if getattr(target, "__name__", "") == "PlateauLRScheduler":
        plateau = "torch.optim.lr_scheduler:ReduceLROnPlateau"
        raise ConfigError(f"SOLVER.LR_SCHEDULER_NAME: timm's {name!r} cannot be resumed; use {plateau!r}")
    if _is_plateau(target) and not metric:
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
    by_metric = _is_plateau(kind_of(LR_SCHEDULER_REGISTRY.get(name, "SOLVER.LR_SCHEDULER_NAME")))
    return (cfg.SOLVER.LR_SCHEDULER_METRIC or cfg.CHECKPOINT.BEST.METRIC) if by_metric else ""


def _is_plateau(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, ReduceLROnPlateau)


def _has_interval(scheduler: Any) -> bool:
    """Return whether ``SOLVER.LR_SCHEDULER_INTERVAL`` says when a scheduler is stepped."""
    if isinstance(scheduler, TorchScheduler):
        return not isinstance(scheduler, LRMultiplier | ReduceLROnPlateau)
    return not isinstance(scheduler, TimmScheduler | ParamScheduler)


def _warn_of_unused(cfg: CfgNode, scheduler: Any, has_warmup: bool) -> None:
    used = {
        "WARMUP_ITERS": has_warmup or not cfg.SOLVER.WARMUP_ITERS,
        "LR_SCHEDULER_METRIC": isinstance(scheduler, ReduceLROnPlateau),
        "LR_SCHEDULER_INTERVAL": _has_interval(scheduler),
    }
    warn_of_unused(cfg, used, f"the schedule {cfg.SOLVER.LR_SCHEDULER_NAME} (see its ARGS)")


def scheduler_hooks(cfg: CfgNode, scheduler: Any) -> list[LRScheduler]:
    """Return the hooks that step the trainer's schedules: one, or one for each of a ``SchedulerList``."""

    def options(cfg: CfgNode, scheduler: Any) -> dict[str, Any]:
        if isinstance(scheduler, ReduceLROnPlateau):
            return {"metric": cfg.SOLVER.LR_SCHEDULER_METRIC or cfg.CHECKPOINT.BEST.METRIC or None}
        return {"interval": cfg.SOLVER.LR_SCHEDULER_INTERVAL} if _has_interval(scheduler) else {}

    if not isinstance(scheduler, SchedulerList):
        return [LRScheduler(**options(cfg, scheduler))]
    parts = solver_parts(cfg)
    return [
        LRScheduler(name=f"lr/{name}", part=name, **options(parts.get(name, cfg), one))
        for name, one in scheduler.named.items()
    ]


# ---------------------------------------------------------------------- schedules by name


@LR_SCHEDULER_REGISTRY.register()
def WarmupMultiStepLR(cfg: CfgNode) -> ParamScheduler:
    """Multiplies by ``SOLVER.GAMMA`` at each of ``SOLVER.STEPS``; steps beyond the end of the run are ignored."""
    max_iter = cfg.SOLVER.MAX_ITER
    steps = [step for step in cfg.SOLVER.STEPS if step < max_iter]
    if len(steps) < len(cfg.SOLVER.STEPS):
        logger.warning(
            "SOLVER.STEPS %s: steps at or beyond MAX_ITER = %d have no effect", tuple(cfg.SOLVER.STEPS), max_iter
        )
    if sorted(set(steps)) != steps or any(step < 1 for step in steps):
        raise ConfigError(f"SOLVER.STEPS must be positive and ascending, not {tuple(cfg.SOLVER.STEPS)}")
    return _steps(cfg, steps)


@LR_SCHEDULER_REGISTRY.register()
def WarmupStepWithFixedGammaLR(cfg: CfgNode) -> ParamScheduler:
    """Multiplies by ``SOLVER.GAMMA`` at ``SOLVER.NUM_DECAYS`` evenly spaced iterations."""
    parts = cfg.SOLVER.NUM_DECAYS + 1
    return _steps(cfg, [cfg.SOLVER.MAX_ITER * part / parts for part in range(1, parts)])


@LR_SCHEDULER_REGISTRY.register()
def WarmupStepLR(cfg: CfgNode, step_size: int = 30000) -> ParamScheduler:
    """Multiplies by ``SOLVER.GAMMA`` every ``step_size`` iterations, such as "5ep"."""
    if step_size < 1:
        raise ConfigError(f"SOLVER.LR_SCHEDULER_ARGS.step_size: must be positive, not {step_size}")
    gamma = cfg.SOLVER.GAMMA
    return FunctionSchedule(lambda iteration: gamma ** (iteration // step_size), _length(cfg))


@LR_SCHEDULER_REGISTRY.register()
def WarmupCosineLR(cfg: CfgNode) -> ParamScheduler:
    """Decays with a half cosine to ``SOLVER.BASE_LR_END`` (Loshchilov and Hutter, arXiv:1608.03983, no restarts)."""
    return CosineParamScheduler(1.0, _end(cfg))


@LR_SCHEDULER_REGISTRY.register()
def WarmupCosineRestartsLR(
    cfg: CfgNode, cycles: int = 4, first_cycle: int | None = None, growth: float = 1.0, decay: float = 1.0
) -> ParamScheduler:
    """Decays with a half cosine to ``SOLVER.BASE_LR_END`` and restarts (SGDR, Loshchilov and Hutter, arXiv:1608.03983).

    Args:
        cfg: the whole config.
        cycles: number of cycles in the run.
        first_cycle: length of the first cycle in iterations, such as "10ep", instead of ``cycles``.
        growth: each cycle is this many times as long as the one before (SGDR's T_mult).
        decay: each cycle starts at this multiple of the rate that the one before started at.
    """
    if cycles < 1 or growth < 1 or not 0 < decay <= 1 or (first_cycle is not None and first_cycle < 1):
        raise ConfigError(
            "SOLVER.LR_SCHEDULER_ARGS: cycles and first_cycle must be positive, growth at least 1, decay in (0, 1], "
            f"not cycles={cycles}, first_cycle={first_cycle}, growth={growth}, decay={decay}"
        )
    end, max_iter = _end(cfg), _length(cfg)
    if first_cycle is None:
        ends = [sum(growth**j for j in range(i + 1)) for i in range(cycles)]
        ends = [max_iter * part / ends[-1] for part in ends]
    else:
        ends = [float(first_cycle)]
        while ends[-1] < max_iter:
            ends.append(ends[-1] + first_cycle * growth ** len(ends))
    starts = [0.0, *ends[:-1]]

    def factor(iteration: float) -> float:
        cycle = min(bisect_right(ends, iteration), len(ends) - 1)  # the last cycle includes the end of the run
        progress = (iteration - starts[cycle]) / (ends[cycle] - starts[cycle])
        peak = max(decay**cycle, end)
        return end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2

    return FunctionSchedule(factor, max_iter)


@LR_SCHEDULER_REGISTRY.register()
def WarmupLinearLR(cfg: CfgNode) -> ParamScheduler:
    """Decays linearly to ``SOLVER.BASE_LR_END``."""
    return LinearParamScheduler(1.0, _end(cfg))


@LR_SCHEDULER_REGISTRY.register()
def WarmupPolynomialLR(cfg: CfgNode, power: float = 1.0) -> ParamScheduler:
    """Decays to ``SOLVER.BASE_LR_END`` as ``(1 - progress) ** power``."""
    end, max_iter = _end(cfg), cfg.SOLVER.MAX_ITER
    return FunctionSchedule(lambda iteration: end + (1 - end) * (1 - iteration / max_iter) ** power, max_iter)


@LR_SCHEDULER_REGISTRY.register()
def WarmupExponentialLR(cfg: CfgNode, decay: float = 0.01) -> ParamScheduler:
    """Decays exponentially to ``decay * SOLVER.BASE_LR``."""
    return ExponentialParamScheduler(1.0, decay)


@LR_SCHEDULER_REGISTRY.register()
def WarmupConstantLR(cfg: CfgNode) -> ParamScheduler:
    """Stays at ``SOLVER.BASE_LR``."""
    return FunctionSchedule(lambda iteration: 1.0, cfg.SOLVER.MAX_ITER)


LR_SCHEDULER_REGISTRY.register(WarmupConstantLR, name="ConstantLR")


@LR_SCHEDULER_REGISTRY.register()
def WarmupInverseSqrtLR(cfg: CfgNode, timescale: int | None = None) -> ParamScheduler:
    """Stays at ``SOLVER.BASE_LR`` until iteration ``timescale`` (default: the length of the warm-up), then decays with
    the inverse square root of the iteration (Vaswani et al., arXiv:1706.03762, section 5.3)."""
    scale = timescale or max(cfg.SOLVER.WARMUP_ITERS, 1)
    return FunctionSchedule(lambda iteration: math.sqrt(scale / max(iteration, scale)), _length(cfg))


@LR_SCHEDULER_REGISTRY.register()
def WarmupStableDecayLR(
    cfg: CfgNode, decay_fraction: float = 0.2, decay_method: str = "linear", decay_iters: int | None = None
) -> ParamScheduler:
    """Warm-up, stable, decay: stays at ``SOLVER.BASE_LR``, and decays to ``SOLVER.BASE_LR_END`` in the last
    ``decay_fraction`` of the run (Hu et al., MiniCPM, arXiv:2404.06395).

    Args:
        cfg: the whole config.
        decay_fraction: fraction of the run, in (0, 1].
        decay_iters: length of the decay in iterations, such as "2ep", instead of ``decay_fraction``.
        decay_method: "linear", "cosine", or "sqrt": 1 - sqrt(progress) (Hägele et al., arXiv:2405.18392).
    """
    shapes: dict[str, Callable[[float], float]] = {
        "linear": lambda progress: 1 - progress,
        "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
        "sqrt": lambda progress: 1 - math.sqrt(progress),
    }
    if decay_method not in shapes or not 0.0 < decay_fraction <= 1.0:
        raise ConfigError(
            f"SOLVER.LR_SCHEDULER_ARGS: decay_method must be one of {', '.join(shapes)} and decay_fraction in (0, 1]; "
            f"got {decay_method!r} and {decay_fraction}"
        )
    end, max_iter, shape = _end(cfg), _length(cfg), shapes[decay_method]
    length = decay_fraction * max_iter if decay_iters is None else min(max(decay_iters, 1), max_iter)

    def factor(iteration: float) -> float:
        progress = min(max(0.0, (iteration - (max_iter - length)) / length), 1.0)
        return end + (1 - end) * shape(progress)

    return FunctionSchedule(factor, max_iter)


@LR_SCHEDULER_REGISTRY.register()
def OneCycleLR(
    cfg: CfgNode, pct_start: float = 0.3, div_factor: float = 25.0, final_div_factor: float = 1e4
) -> ParamScheduler:
    """Rises with a cosine to ``SOLVER.BASE_LR`` and falls with another (Smith and Topin, arXiv:1708.07120). The rise
    replaces the warm-up.

    Args:
        cfg: the whole config.
        pct_start: fraction of the run, in (0, 1), for the rise.
        div_factor: the run starts at ``BASE_LR / div_factor``.
        final_div_factor: the run ends at the start value divided by ``final_div_factor``.
    """
    if not 0.0 < pct_start < 1.0:
        raise ConfigError(f"SOLVER.LR_SCHEDULER_ARGS: pct_start must be in (0, 1), not {pct_start}")
    start = 1.0 / div_factor
    rise = CosineParamScheduler(start, 1.0)
    fall = CosineParamScheduler(1.0, start / final_div_factor)
    max_iter = cfg.SOLVER.MAX_ITER
    peak = pct_start * max_iter

    def factor(iteration: float) -> float:
        return rise(iteration / peak) if iteration < peak else fall((iteration - peak) / (max_iter - peak))

    return FunctionSchedule(factor, max_iter, has_warmup=True)


def _steps(cfg: CfgNode, milestones: Sequence[float]) -> ParamScheduler:
    gamma = cfg.SOLVER.GAMMA
    return FunctionSchedule(lambda iteration: gamma ** bisect_right(milestones, iteration), cfg.SOLVER.MAX_ITER)


def _length(cfg: CfgNode) -> int:
    """Return the number of iterations of the schedule, without those of a warm-up before it."""
    solver = cfg.SOLVER
    return max(1, solver.MAX_ITER - solver.WARMUP_ITERS) if solver.RESCALE_INTERVAL else int(solver.MAX_ITER)


def _end(cfg: CfgNode) -> float:
    """Return the final factor, from ``SOLVER.BASE_LR_END``."""
    base, end = cfg.SOLVER.BASE_LR, cfg.SOLVER.BASE_LR_END
    if not 0.0 <= end <= base:
        raise ConfigError(f"SOLVER.BASE_LR_END is {end}: it must be between 0 and SOLVER.BASE_LR ({base})")
    return end / base if base else 0.0
