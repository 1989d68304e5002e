"""Lengths in iterations: from epochs, and for another number of processes."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...config import CfgNode, ConfigError, Duration
from ...config.components import period_of
from ..solver.parts import solver_parts
from ..solver.scheduling import resolve_schedule

__all__ = [
    "Segment",
    "epochs_at",
    "iteration_of",
    "loader_length",
    "resolve_lengths",
    "scale_config",
    "segments_since",
]

logger = logging.getLogger(__name__)

Segment = tuple[int, float, int]
"""A part of a run with one epoch length: its first iteration, the epochs done before it, iterations per epoch."""


def resolve_lengths(cfg: CfgNode, iters_per_epoch: int | None, segments: Sequence[Segment] = ()) -> CfgNode:
    """Return a copy of a config with MAX_ITER, WARMUP_ITERS, STEPS and the schedule's arguments in iterations.

    Args:
        cfg: the config.
        iters_per_epoch: batches in one pass over the data; None if unknown.
        segments: see :func:`segments_since`, if the epoch length changed during the run.

    Raises:
        ConfigError: a length is in epochs, and the epoch length is unknown.
    """

    def iterations(key: str, length: Any) -> int:
        try:
            duration = Duration.parse_length(length)
            if segments and duration.unit == "ep":
                return iteration_of(duration.value, segments)
            return duration.iterations(iters_per_epoch)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None

    given, frozen = cfg, cfg.is_frozen()
    cfg = resolve_schedule(cfg, iters_per_epoch, partial(iterations, "SOLVER.LR_SCHEDULER_ARGS")).clone()
    cfg.defrost()
    solver = cfg.SOLVER
    solver.MAX_ITER = iterations("SOLVER.MAX_ITER", solver.MAX_ITER)
    part = Duration.fraction(solver.WARMUP_ITERS)
    solver.WARMUP_ITERS = (
        max(1, round(part * solver.MAX_ITER)) if part else iterations("SOLVER.WARMUP_ITERS", solver.WARMUP_ITERS)
    )
    solver.STEPS = tuple(iterations("SOLVER.STEPS", step) for step in solver.STEPS)
    for name, part in solver_parts(given).items():
        entry, resolved = solver.OPTIMIZERS[name], resolve_lengths(part, iters_per_epoch, segments).SOLVER
        for key in ("WARMUP_ITERS", "STEPS", "LR_SCHEDULER_ARGS"):
            if key in entry or resolved[key] != solver[key]:  # "1ep" may be another number of steps
                entry[key] = resolved[key]
    if frozen:
        cfg.freeze()
    return cfg


def scale_config(cfg: CfgNode, num_workers: int) -> CfgNode:
    """Scale a config made for SOLVER.REFERENCE_WORLD_SIZE processes to ``num_workers`` processes.

    The batch per process stays the same: batch size and learning rate grow with the number of processes, lengths and
    periods in iterations shrink (Goyal et al., "Accurate, Large Minibatch SGD", 2017).

    Returns:
        A new config, or ``cfg`` itself if there is nothing to scale.
    """
    old = cfg.SOLVER.REFERENCE_WORLD_SIZE
    if old in (0, num_workers):
        return cfg
    if cfg.DATALOADER.BATCH_SIZE % old:
        raise ConfigError(
            f"DATALOADER.BATCH_SIZE: {cfg.DATALOADER.BATCH_SIZE} is not a multiple of "
            f"SOLVER.REFERENCE_WORLD_SIZE, {old}"
        )
    scale = num_workers / old
    frozen, cfg = cfg.is_frozen(), cfg.clone()
    cfg.defrost()

    def scaled(length: int | str) -> int | str:
        """Scale a length in iterations; those in epochs or minutes, and fractions of the run, do not change."""
        if Duration.fraction(length):
            return length
        duration = Duration.parse(length)
        return round(duration.value / scale) if duration.unit == "it" else length

    solver = cfg.SOLVER
    cfg.DATALOADER.BATCH_SIZE = round(cfg.DATALOADER.BATCH_SIZE * scale)
    solver.MAX_ITER = scaled(solver.MAX_ITER)
    for one in (solver, *solver.OPTIMIZERS.values()):  # a part has only the keys that it changes
        if "BASE_LR" in one:
            one.BASE_LR *= scale
        if "WARMUP_ITERS" in one:
            one.WARMUP_ITERS = scaled(one.WARMUP_ITERS)
        if "STEPS" in one:
            one.STEPS = tuple(scaled(step) for step in one.STEPS)
    solver.CHECKPOINT_PERIOD = scaled(solver.CHECKPOINT_PERIOD)
    cfg.TEST.EVAL_PERIOD = scaled(cfg.TEST.EVAL_PERIOD)
    cfg.DATASETS.TEST = tuple(
        entry if period_of(entry) is None else {**entry, "EVAL_PERIOD": scaled(period_of(entry))}
        for entry in cfg.DATASETS.TEST
    )
    cfg.CHECKPOINT.BEST.PERIOD = scaled(cfg.CHECKPOINT.BEST.PERIOD)
    solver.REFERENCE_WORLD_SIZE = num_workers
    logger.info(
        "Scaled from %d to %d processes: batch size %d, learning rate %g, %s iterations",
        old,
        num_workers,
        cfg.DATALOADER.BATCH_SIZE,
        solver.BASE_LR,
        solver.MAX_ITER,
    )
    if frozen:
        cfg.freeze()
    return cfg


def loader_length(loader: Any) -> int | None:
    """Return the number of batches in one pass over the data, also if the sampler never ends; None if unknown."""
    try:
        return len(loader)
    except TypeError:
        pass
    try:
        size = len(loader.dataset)
    except (AttributeError, TypeError):
        return None
    sampler = getattr(loader, "batch_sampler", None)
    batch_size = getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None)
    return max(1, size // batch_size) if batch_size else None


# ---------------------------------------------------------------------- runs whose epoch length changed


def segments_since(
    saved: Sequence[Sequence[float]], iteration: int, epoch: int, position: int, iters_per_epoch: int | None
) -> list[Segment]:
    """Return the parts of a run with different epoch lengths. Another batch size changes the epoch length.

    Args:
        saved: the parts up to the checkpoint; empty if the epoch length was unknown.
        iteration: the first iteration of the resumed run.
        epoch, position: its position in the data; ``position`` counts iterations of the new length.
        iters_per_epoch: the new epoch length; None if unknown.

    Returns:
        The parts, the present one last; empty if none is known.
    """
    segments = [(int(start), float(epochs), int(length)) for start, epochs, length in saved]
    if not iters_per_epoch or (segments and segments[-1][2] == iters_per_epoch):
        return segments
    if not segments and iteration:
        return []
    return [*segments, (iteration, epoch + position / iters_per_epoch, iters_per_epoch)]


def iteration_of(epochs: float, segments: Sequence[Segment]) -> int:
    """Return the number of iterations in the first ``epochs`` epochs."""
    start, before, length = [segment for segment in segments if segment[1] <= epochs][-1]
    return max(1, start + round((epochs - before) * length))


def epochs_at(iteration: int, segments: Sequence[Segment]) -> float:
    """Return the number of epochs in the first ``iteration`` iterations."""
    start, before, length = [segment for segment in segments if segment[0] <= iteration][-1]
    return before + (iteration - start) / length
