"""The schedules of ``LR_SCHEDULER_REGISTRY``, by the names they have in a config.

Each entry is called with the config, and with ``SOLVER.LR_SCHEDULER_ARGS``; it returns the factor of
``SOLVER.BASE_LR`` as a function of progress. The warm-up is put in front of it by ``build_lr_scheduler``.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from fvcore.common.param_scheduler import (
    CosineParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    ParamScheduler,
)
from torch.optim.lr_scheduler import LRScheduler

from ...config import CfgNode, ConfigError, Registry

__all__ = ["LR_SCHEDULER_REGISTRY", "FunctionSchedule"]

logger = logging.getLogger(__name__)

LR_SCHEDULER_REGISTRY = Registry("LR_SCHEDULER", (LRScheduler, ParamScheduler))
"""Schedules for ``SOLVER.LR_SCHEDULER_NAME``: ``(cfg, **SOLVER.LR_SCHEDULER_ARGS) -> ParamScheduler``."""


class FunctionSchedule(ParamScheduler):
    """A schedule given by a function of the iteration.

    Args:
        factor: from the number of updates made, 0 to ``max_iter``, to the factor of the base learning rate. It must
            depend on nothing else: it is asked ahead of time.
        max_iter: updates of the whole run.
        has_warmup: the function has a warm-up of its own: none is put in front of it.
    """

    def __init__(self, factor: Callable[[float], float], max_iter: int, has_warmup: bool = False) -> None:
        self._factor = factor
        self._max_iter = max_iter
        self.has_warmup = has_warmup

    def __call__(self, where: float) -> float:
        iteration = where * self._max_iter
        if abs(iteration - round(iteration)) < 1e-6:  # what was divided by max_iter is itself again
            iteration = round(iteration)
        return self._factor(iteration)


@LR_SCHEDULER_REGISTRY.register()
def WarmupMultiStepLR(cfg: CfgNode) -> ParamScheduler:
    """Multiplied by ``SOLVER.GAMMA`` at each of ``SOLVER.STEPS``; steps beyond the run's end are left out."""
    max_iter = cfg.SOLVER.MAX_ITER
    steps = [step for step in cfg.SOLVER.STEPS if step < max_iter]
    if len(steps) < len(cfg.SOLVER.STEPS):
        logger.warning(
            "SOLVER.STEPS %s: those at or beyond MAX_ITER = %d have no effect", tuple(cfg.SOLVER.STEPS), max_iter
        )
    if sorted(set(steps)) != steps or any(step < 1 for step in steps):
        raise ConfigError(f"SOLVER.STEPS must be positive and ascending, not {tuple(cfg.SOLVER.STEPS)}")
    return _steps(cfg, steps)


@LR_SCHEDULER_REGISTRY.register()
def WarmupStepWithFixedGammaLR(cfg: CfgNode) -> ParamScheduler:
    """Multiplied by ``SOLVER.GAMMA`` ``SOLVER.NUM_DECAYS`` times, evenly spread over the run."""
    parts = cfg.SOLVER.NUM_DECAYS + 1
    return _steps(cfg, [cfg.SOLVER.MAX_ITER * part / parts for part in range(1, parts)])


@LR_SCHEDULER_REGISTRY.register()
def WarmupCosineLR(cfg: CfgNode) -> ParamScheduler:
    """Half a cosine down to ``SOLVER.BASE_LR_END`` (Loshchilov and Hutter, arXiv:1608.03983, without restarts)."""
    return CosineParamScheduler(1.0, _end(cfg))


@LR_SCHEDULER_REGISTRY.register()
def WarmupLinearLR(cfg: CfgNode) -> ParamScheduler:
    """A straight line down to ``SOLVER.BASE_LR_END``."""
    return LinearParamScheduler(1.0, _end(cfg))


@LR_SCHEDULER_REGISTRY.register()
def WarmupPolynomialLR(cfg: CfgNode, power: float = 1.0) -> ParamScheduler:
    """Down to ``SOLVER.BASE_LR_END`` as the remaining share of the run to the given power."""
    end, max_iter = _end(cfg), cfg.SOLVER.MAX_ITER
    return FunctionSchedule(lambda iteration: end + (1 - end) * (1 - iteration / max_iter) ** power, max_iter)


@LR_SCHEDULER_REGISTRY.register()
def WarmupExponentialLR(cfg: CfgNode, decay: float = 0.01) -> ParamScheduler:
    """Decays by a constant ratio, to ``decay`` times ``SOLVER.BASE_LR`` at the end."""
    return ExponentialParamScheduler(1.0, decay)


@LR_SCHEDULER_REGISTRY.register()
def WarmupConstantLR(cfg: CfgNode) -> ParamScheduler:
    """Always ``SOLVER.BASE_LR``."""
    return FunctionSchedule(lambda iteration: 1.0, cfg.SOLVER.MAX_ITER)


@LR_SCHEDULER_REGISTRY.register()
def ConstantLR(cfg: CfgNode) -> ParamScheduler:
    """Another name of :func:`WarmupConstantLR`."""
    return WarmupConstantLR(cfg)


@LR_SCHEDULER_REGISTRY.register()
def WarmupInverseSqrtLR(cfg: CfgNode, timescale: int | None = None) -> ParamScheduler:
    """``SOLVER.BASE_LR`` until iteration ``timescale``, then falling with the iteration's square root (Vaswani et al.,
    arXiv:1706.03762, section 5.3). By default ``timescale`` is the warm-up's length."""
    scale = timescale or max(cfg.SOLVER.WARMUP_ITERS, 1)
    return FunctionSchedule(lambda iteration: math.sqrt(scale / max(iteration, scale)), cfg.SOLVER.MAX_ITER)


@LR_SCHEDULER_REGISTRY.register()
def WarmupStableDecayLR(cfg: CfgNode, decay_fraction: float = 0.2, decay_method: str = "linear") -> ParamScheduler:
    """Warm-up, stable, decay: ``SOLVER.BASE_LR``, and in the run's last ``decay_fraction`` down to
    ``SOLVER.BASE_LR_END`` (Hu et al., MiniCPM, arXiv:2404.06395).

    Args:
        cfg: the whole config.
        decay_fraction: share of the run, in (0, 1].
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
    end, max_iter, shape = _end(cfg), cfg.SOLVER.MAX_ITER, shapes[decay_method]
    length = decay_fraction * max_iter

    def factor(iteration: float) -> float:
        progress = min(max(0.0, (iteration - (max_iter - length)) / length), 1.0)
        return end + (1 - end) * shape(progress)

    return FunctionSchedule(factor, max_iter)


@LR_SCHEDULER_REGISTRY.register()
def OneCycleLR(
    cfg: CfgNode, pct_start: float = 0.3, div_factor: float = 25.0, final_div_factor: float = 1e4
) -> ParamScheduler:
    """One cosine up to ``SOLVER.BASE_LR`` and one down (Smith and Topin, arXiv:1708.07120). It is its own warm-up.

    Args:
        cfg: the whole config.
        pct_start: share of the run, in (0, 1), that the rise takes.
        div_factor: the run starts at ``BASE_LR / div_factor``,
        final_div_factor: and ends at that divided by ``final_div_factor``.
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


def _end(cfg: CfgNode) -> float:
    """The last factor, from ``SOLVER.BASE_LR_END``."""
    base, end = cfg.SOLVER.BASE_LR, cfg.SOLVER.BASE_LR_END
    if not 0.0 <= end <= base:
        raise ConfigError(f"SOLVER.BASE_LR_END is {end}: it must be between 0 and SOLVER.BASE_LR ({base})")
    return end / base if base else 0.0
