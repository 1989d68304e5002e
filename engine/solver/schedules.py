"""Learning rate schedules of a config.

The learning rate of step n is a group's base rate times ``factor(n / MAX_ITER)``. Each entry of
``LR_SCHEDULER_REGISTRY`` takes the config and ``SOLVER.LR_SCHEDULER_ARGS``, and returns the factor as a function of
progress. ``build_lr_scheduler`` adds the warm-up, and puts both into an ``LRMultiplier``, whose ``step()`` the hook
``LRScheduler`` calls after each step.
"""

import inspect
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from fvcore.common.param_scheduler import (
    ConstantParamScheduler,
    CosineParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    ParamScheduler,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as TorchScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...config import CfgNode, ConfigError, Duration, Registry
from ...config.components import ComponentKey, errors_at, mode_of_result
from ...config.values import kind_of
from ...hooks import LRScheduler
from ...hooks.builtin.lr_scheduler import LRMultiplier, TimmScheduler, WarmupParamScheduler, takes_epoch
from ...hooks.evaluation import names_function
from .multi_optimizer import OptimizerList, SchedulerList, solver_parts
from .param_groups import full_config, warn_of_unused

logger = logging.getLogger(__name__)

LR_SCHEDULER_REGISTRY = Registry("LR_SCHEDULER", (TorchScheduler, ParamScheduler, TimmScheduler))
"""Schedules for ``SOLVER.LR_SCHEDULER_NAME``: ``(cfg, **SOLVER.LR_SCHEDULER_ARGS) -> ParamScheduler``, or torch's and
timm's schedulers: ``(optimizer, **SOLVER.LR_SCHEDULER_ARGS)``."""

SCHEDULER_KEY = ComponentKey(LR_SCHEDULER_REGISTRY, "SOLVER.LR_SCHEDULER_NAME", offers=(), positional=1)
"""For torch's and timm's schedulers, and functions ``(optimizer, ...)`` that return one."""


class _ScheduleKey(ComponentKey):
    """The key of a schedule that takes the config, or of one that takes the optimizer."""

    def check(self, cfg: CfgNode) -> list[Any]:
        return (
            SCHEDULER_KEY.check(cfg) if self.name(cfg) and _takes_optimizer(_target(cfg.SOLVER)) else super().check(cfg)
        )

    def build(self, cfg: CfgNode, *positional: Any, **offered: Any) -> Any:
        if _takes_optimizer(_target(cfg.SOLVER)):
            return SCHEDULER_KEY.build(cfg, *positional, **offered)
        return super().build(cfg)


SCHEDULE_KEY = _ScheduleKey(LR_SCHEDULER_REGISTRY, "SOLVER.LR_SCHEDULER_NAME")

RUN_VALUES = ("end", "epochs", "iters_per_epoch", "max_iter")
"""Arguments that are known only when the data is: the scheduler's steps in the whole run; epochs of the run; iterations
in an epoch; iterations of the run."""


def build_lr_scheduler(cfg: CfgNode, optimizer: Optimizer | OptimizerList) -> Any:
    """Build the learning rate schedule of ``cfg.SOLVER``. Call its ``step()`` once after each update.

    torch's schedulers may count something else (``SOLVER.LR_SCHEDULER_INTERVAL``), and timm's have their own calls: the
    hook :class:`~hookline.hooks.LRScheduler` makes them.

    Args:
        cfg: the whole config, with ``MAX_ITER``, ``WARMUP_ITERS`` and ``STEPS`` in iterations.
        optimizer: the optimizer whose learning rates the schedule sets. For an ``OptimizerList`` the result is a
            ``SchedulerList``, with the schedules of ``SOLVER.OPTIMIZERS`` or the same one for all.

    Raises:
        ConfigError: a length is in epochs, or name or arguments are wrong.
    """
    cfg = full_config(cfg)
    if isinstance(optimizer, OptimizerList):
        parts = solver_parts(cfg)
        named = optimizer.named.items()
        return SchedulerList({name: build_lr_scheduler(parts.get(name, cfg), one) for name, one in named})
    cfg = resolve_lengths(cfg, None)
    solver = cfg.SOLVER
    solver.MAX_ITER = max(1, solver.MAX_ITER)  # schedules divide by it
    target = _target(cfg.SOLVER)
    if getattr(target, "__name__", "") == "PlateauLRScheduler":
        plateau = "torch.optim.lr_scheduler:ReduceLROnPlateau"
        raise ConfigError(
            f"SOLVER.LR_SCHEDULER_NAME: timm's {solver.LR_SCHEDULER_NAME!r} gets no metric; use {plateau!r}"
        )
    mode = {"mode": _plateau_mode(cfg)} if isinstance(target, type) and issubclass(target, ReduceLROnPlateau) else {}
    schedule = SCHEDULE_KEY.build(cfg, optimizer, **mode)
    is_factor = not _takes_optimizer(target)
    if is_factor and not isinstance(schedule, ParamScheduler):
        raise ConfigError(
            f"SOLVER.LR_SCHEDULER_NAME: {solver.LR_SCHEDULER_NAME!r} must be a torch LRScheduler class, or return "
            f"a fvcore ParamScheduler; it returned {schedule!r}"
        )
    unused = ["WARMUP_ITERS"] if solver.WARMUP_ITERS and not is_factor else []
    unused += [] if isinstance(schedule, ReduceLROnPlateau) else ["LR_SCHEDULER_METRIC"]
    unused += [] if _has_interval(schedule) else ["LR_SCHEDULER_INTERVAL"]
    warn_of_unused(cfg, unused, f"the schedule {solver.LR_SCHEDULER_NAME} (see its ARGS)")
    if not is_factor:
        return schedule
    if solver.WARMUP_ITERS >= solver.MAX_ITER:
        logger.warning(
            "SOLVER.WARMUP_ITERS (%d) is not less than MAX_ITER (%d): the whole run is warm-up; 0 turns it off",
            solver.WARMUP_ITERS,
            solver.MAX_ITER,
        )
    length = min(solver.WARMUP_ITERS / solver.MAX_ITER, 1.0)
    arguments = (solver.WARMUP_FACTOR, length, solver.WARMUP_METHOD, solver.RESCALE_INTERVAL)
    with errors_at("SOLVER.WARMUP_METHOD"):
        schedule = WarmupParamScheduler(schedule, *arguments)
    return LRMultiplier(optimizer, schedule, solver.MAX_ITER)


def resolve_lengths(cfg: CfgNode, iters_per_epoch: int | None, offset: int = 0) -> CfgNode:
    """Return a copy of a config with MAX_ITER, WARMUP_ITERS and STEPS in iterations, and ``LR_SCHEDULER_ARGS`` in the
    scheduler's steps, also in ``SOLVER.OPTIMIZERS``.

    Args:
        cfg: the config.
        iters_per_epoch: batches in one pass over the data; None if unknown.
        offset: added to a length in epochs; see :class:`hookline.engine.solver.lengths.Lengths`.

    Raises:
        ConfigError: a length is in epochs, and the epoch length is unknown; or it is a time.
    """

    def iterations(length: object) -> int:
        duration = Duration.parse_length(length)
        count = duration.iterations(iters_per_epoch)
        return max(1, count + offset) if count and duration.unit == "ep" else count

    def argument(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(argument, value))
        # Other text is the name of a method, such as "linear".
        if not isinstance(value, str) or not (value in RUN_VALUES or (value[:1].isdigit() and not value.isdigit())):
            return value
        if value == "iters_per_epoch":
            return Duration.parse("1ep").iterations(iters_per_epoch)
        length = Duration.parse_length(max_iter if value in RUN_VALUES else value)
        if value != "epochs" and (value == "max_iter" or not by_epoch):
            return iterations(length)
        per_epoch = 1 if length.unit == "ep" else Duration.parse("1ep").iterations(iters_per_epoch)
        epochs = length.value / per_epoch
        return math.ceil(epochs) if value in RUN_VALUES else max(1, round(epochs))

    parts = solver_parts(cfg) if cfg.SOLVER.OPTIMIZERS else {}
    cfg = cfg.thawed()
    solver, max_iter = cfg.SOLVER, cfg.SOLVER.MAX_ITER
    by_epoch = bool(solver.LR_SCHEDULER_ARGS) and _counts_epochs(solver)
    for key, value in solver.LR_SCHEDULER_ARGS.items():
        with errors_at(f"SOLVER.LR_SCHEDULER_ARGS.{key}"):
            solver.LR_SCHEDULER_ARGS[key] = argument(value)
    with errors_at("SOLVER.MAX_ITER"):
        solver.MAX_ITER = iterations(max_iter)
    with errors_at("SOLVER.WARMUP_ITERS"):
        part = Duration.fraction(solver.WARMUP_ITERS)
        solver.WARMUP_ITERS = max(1, round(part * solver.MAX_ITER)) if part else iterations(solver.WARMUP_ITERS)
    with errors_at("SOLVER.STEPS"):
        solver.STEPS = tuple(map(iterations, solver.STEPS))
    for name, part in parts.items():
        entry, resolved = solver.OPTIMIZERS[name], resolve_lengths(part, iters_per_epoch, offset).SOLVER
        for key in ("WARMUP_ITERS", "STEPS", "LR_SCHEDULER_ARGS"):
            if key in entry or resolved[key] != solver[key]:  # "1ep" may be another number of steps
                entry[key] = resolved[key]
    return cfg


def _counts_epochs(solver: CfgNode) -> bool:
    """Return whether the scheduler counts epochs, and not iterations.

    timm's do, unless ``t_in_epochs`` is False; pytorch-accelerated's do not.
    """
    kind = _target(solver) if solver.LR_SCHEDULER_NAME else None
    if isinstance(kind, type) and issubclass(kind, TimmScheduler) and not issubclass(kind, TorchScheduler):
        return takes_epoch(kind) and bool(solver.LR_SCHEDULER_ARGS.get("t_in_epochs", True))
    return bool(solver.LR_SCHEDULER_INTERVAL == "epoch")


def _plateau_mode(cfg: CfgNode) -> str:
    """Return whether more or less of ReduceLROnPlateau's metric is better.

    Raises:
        ConfigError: no metric is named.
    """
    solver, best = cfg.SOLVER, cfg.CHECKPOINT.BEST
    metric = solver.LR_SCHEDULER_METRIC or best.METRIC
    if not metric or names_function(metric):
        raise ConfigError(
            f"SOLVER.LR_SCHEDULER_METRIC: {solver.LR_SCHEDULER_NAME!r} needs the name of a metric, such as "
            f'"digits_test/loss", not {metric!r}; its default is CHECKPOINT.BEST.METRIC'
        )
    return mode_of_result(cfg, metric, best.MODE if metric == best.METRIC else "auto")


def _target(solver: CfgNode) -> Any:
    return kind_of(LR_SCHEDULER_REGISTRY.get(solver.LR_SCHEDULER_NAME, "SOLVER.LR_SCHEDULER_NAME"))


def _takes_optimizer(target: Callable[..., object]) -> bool:
    if isinstance(target, type):
        return issubclass(target, TorchScheduler | TimmScheduler)
    return next(iter(inspect.signature(target).parameters), "") == "optimizer"


def _has_interval(scheduler: object) -> bool:
    """Return whether ``SOLVER.LR_SCHEDULER_INTERVAL`` says when a scheduler is stepped."""
    if isinstance(scheduler, TorchScheduler):
        return not isinstance(scheduler, LRMultiplier | ReduceLROnPlateau)
    return not isinstance(scheduler, TimmScheduler | ParamScheduler)


def scheduler_hooks(cfg: CfgNode, scheduler: Any) -> list[LRScheduler]:
    """Return the hooks that step the trainer's schedules: one, or one for each of a ``SchedulerList``.

    Raises:
        ConfigError: one needs a metric, and nothing is evaluated during training.
    """
    several = isinstance(scheduler, SchedulerList)
    parts = solver_parts(cfg) if several else {}
    hooks = []
    for name, one in scheduler.named.items() if several else [("", scheduler)]:
        solver = parts.get(name, cfg).SOLVER
        options: dict[str, Any] = {"name": f"lr/{name}", "part": name} if several else {}
        if isinstance(one, ReduceLROnPlateau):
            options["metric"] = metric = solver.LR_SCHEDULER_METRIC or cfg.CHECKPOINT.BEST.METRIC
            # Hooks may evaluate; and a script, for a scheduler of its own.
            is_alone = type(one).__name__ in solver.LR_SCHEDULER_NAME and not cfg.HOOKS
            if is_alone and not Duration.parse(cfg.TEST.EVAL_PERIOD):
                raise ConfigError(
                    f"TEST.EVAL_PERIOD: is 0, so {type(one).__name__} has no effect, as the only evaluation is at the "
                    'end; set it, for example to "1ep"'
                )
            if is_alone and "/" in metric and not cfg.DATASETS.TEST:
                raise ConfigError(f"SOLVER.LR_SCHEDULER_METRIC: DATASETS.TEST is empty, so there is no {metric}")
        elif _has_interval(one):
            options["interval"] = solver.LR_SCHEDULER_INTERVAL
        hooks.append(LRScheduler(**options))
    return hooks


# ---------------------------------------------------------------------- schedules by name


class FunctionSchedule(ParamScheduler):
    """A schedule given by a function of the iteration.

    Args:
        factor: from the number of updates, 0 to ``max_iter``, to the factor of the base learning rate.
        max_iter: number of updates in the whole run.
    """

    def __init__(self, factor: Callable[[float], float], max_iter: int) -> None:
        self._factor = factor
        self._max_iter = max_iter

    def __call__(self, where: float) -> float:
        iteration = where * self._max_iter
        nearest = round(iteration)
        return self._factor(nearest if abs(iteration - nearest) < 1e-6 else iteration)  # undo the division's rounding


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
    return ConstantParamScheduler(1.0)


LR_SCHEDULER_REGISTRY.register(WarmupConstantLR, name="ConstantLR")


@LR_SCHEDULER_REGISTRY.register()
def WarmupInverseSqrtLR(cfg: CfgNode, timescale: int | None = None) -> ParamScheduler:
    """Stays at ``SOLVER.BASE_LR`` until iteration ``timescale`` (default: the length of the warm-up), then decays with
    the inverse square root of the iteration (Vaswani et al., arXiv:1706.03762, section 5.3)."""
    scale = timescale or max(cfg.SOLVER.WARMUP_ITERS, 1)
    return FunctionSchedule(lambda iteration: math.sqrt(scale / max(iteration, scale)), _length(cfg))


@LR_SCHEDULER_REGISTRY.register()
def WarmupStableDecayLR(cfg: CfgNode, decay_fraction: float = 0.2) -> ParamScheduler:
    """Warm-up, stable, decay: stays at ``SOLVER.BASE_LR``, and decays linearly to ``SOLVER.BASE_LR_END`` in the last
    ``decay_fraction`` of the run (Hu et al., MiniCPM, arXiv:2404.06395)."""
    if not 0.0 < decay_fraction <= 1.0:
        raise ConfigError(f"SOLVER.LR_SCHEDULER_ARGS.decay_fraction: must be in (0, 1], not {decay_fraction}")
    end, max_iter = _end(cfg), _length(cfg)
    length = decay_fraction * max_iter

    def factor(iteration: float) -> float:
        progress = min(max(0.0, (iteration - (max_iter - length)) / length), 1.0)
        return end + (1 - end) * (1 - progress)

    return FunctionSchedule(factor, max_iter)


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
