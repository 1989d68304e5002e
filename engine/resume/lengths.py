"""Lengths in iterations, from epochs and for another number of processes, and schedules of another length."""

import copy
import logging
import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...config import CfgNode, ConfigError, Duration
from ...config.components import period_of
from ...hooks.control.lr_scheduler import TimmScheduler, takes_epoch
from ...hooks.writers.periodic import PeriodicWriter
from ..solver import LRMultiplier, SchedulerList
from ..solver.schedules import resolve_schedule
from ..solver.several import one_or_several, schedulers_of, solver_parts

__all__ = [
    "apply_max_iter",
    "check_length",
    "epoch_offset",
    "loader_length",
    "rebuild_schedule",
    "resolve_lengths",
    "scale_config",
    "set_rates",
]

logger = logging.getLogger(__name__)


def resolve_lengths(cfg: CfgNode, iters_per_epoch: int | None, offset: int = 0) -> CfgNode:
    """Return a copy of a config with MAX_ITER, WARMUP_ITERS, STEPS and the schedule's arguments in iterations.

    Args:
        cfg: the config.
        iters_per_epoch: batches in one pass over the data; None if unknown.
        offset: see :func:`epoch_offset`.

    Raises:
        ConfigError: a length is in epochs, and the epoch length is unknown.
    """

    def iterations(key: str, length: Any) -> int:
        try:
            duration = Duration.parse_length(length)
            count = duration.iterations(iters_per_epoch)
            return max(1, count + offset) if count and duration.unit == "ep" else count
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
        entry, resolved = solver.OPTIMIZERS[name], resolve_lengths(part, iters_per_epoch, offset).SOLVER
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


# ---------------------------------------------------------------------------- runs whose epoch length changed


def epoch_offset(saved: Mapping[str, Any], iteration: int, epoch: int, position: int, length: int | None) -> int:
    """Return how many more iterations a run has done than its epochs take with the present epoch length.

    Another batch size changes the epoch length. Then a length in epochs is ``epochs * length + offset`` iterations.

    Args:
        saved: the "epochs" entry of the checkpoint: epoch length and offset of the run that wrote it.
        iteration: the first iteration of the resumed run.
        epoch, position: its position in the data; ``position`` counts iterations of the present epoch length.
        length: iterations in an epoch; None if unknown.
    """
    before = saved.get("length")
    if not length or not before or before == length:
        return int(saved.get("offset", 0))
    return iteration - epoch * length - position


# ---------------------------------------------------------------------------- schedules


def apply_max_iter(trainer: Any) -> None:
    """Put a new ``max_iter`` into the config, the schedule and the writers of a DefaultTrainer."""
    cfg, given = trainer.cfg.clone(), trainer.given.clone()
    cfg.defrost()
    given.defrost()
    given.SOLVER.MAX_ITER = cfg.SOLVER.MAX_ITER = max(1, trainer.max_iter)
    resolved = resolve_lengths(given, trainer.iters_per_epoch, trainer._epoch_offset).SOLVER
    cfg.SOLVER.LR_SCHEDULER_ARGS, cfg.SOLVER.OPTIMIZERS = resolved.LR_SCHEDULER_ARGS, resolved.OPTIMIZERS
    if trainer.cfg.is_frozen():
        cfg.freeze()
    rebuild_schedule(trainer, cfg)
    check_length(trainer, trainer.cfg.SOLVER.MAX_ITER)
    trainer._set_config(cfg)
    for hook in trainer.find_hooks(PeriodicWriter):
        hook.set_max_iter(trainer.max_iter)


def rebuild_schedule(trainer: Any, cfg: CfgNode) -> None:
    """Replace the trainer's schedules by those of a config, at the present position.

    hookline's own schedules are functions of the position. torch's and timm's are stepped to it. ReduceLROnPlateau,
    and a schedule that cannot be built again because the trainer was given the object, are kept.
    """
    own = all(isinstance(one, LRMultiplier) for one in schedulers_of(trainer.scheduler))
    if not own and trainer.max_iter <= trainer.finished_iter + 1:  # torch's cannot be stepped beyond their end
        return
    groups = trainer.optimizer.param_groups
    before = [copy.deepcopy({key: value for key, value in group.items() if key != "params"}) for group in groups]
    for group in groups:
        _set(group, {"lr": group.get("initial_lr", group["lr"])})
    with warnings.catch_warnings():  # torch warns that no step of the optimizer comes between
        warnings.simplefilter("ignore")
        fresh = one_or_several(trainer.build_lr_scheduler(cfg, trainer.optimizer), SchedulerList)
        new = fresh.named if isinstance(fresh, SchedulerList) else {"": fresh}
        old = trainer.scheduler.named if isinstance(trainer.scheduler, SchedulerList) else {"": trainer.scheduler}
        for name, one in new.items():
            new[name] = _at_position(one, old[name], trainer)
    kept = {id(g) for name in new if new[name] is old[name] for g in getattr(old[name].optimizer, "param_groups", ())}
    for group, values in zip(groups, before, strict=True):
        if id(group) in kept:
            _set(group, values)
    trainer.scheduler = fresh if isinstance(fresh, SchedulerList) else new[""]


def check_length(trainer: Any, former: int) -> None:
    """Check that the schedules of a longer run do not have the length of the former one, as a number.

    Raises:
        ConfigError: one has; most of torch's would go on with a rate that rises again.
    """
    if trainer.max_iter <= former:
        return
    lengths = {former, math.ceil(former / (trainer.iters_per_epoch or 1))}
    for one in schedulers_of(trainer.scheduler):
        for name in ("T_max", "total_steps", "total_iters", "t_initial"):
            if (length := getattr(one, name, None)) in lengths:
                trainer._max_iter = former
                raise ConfigError(
                    f"max_iter: the run cannot be longer than {former} iterations, since its schedule "
                    f"{type(one).__name__} was built for them ({name}={length}). Name the schedule with "
                    f'{{{name}: "end"}}, which follows the length of the run'
                )


def _at_position(fresh: Any, present: Any, trainer: Any) -> Any:
    """Return ``fresh`` at the trainer's position, or ``present`` if it has to stay."""
    if fresh is present:
        return present
    if type(fresh) is type(present) and isinstance(fresh, LRMultiplier):
        fresh.load_state_dict(present.state_dict())
        set_rates(fresh)
    elif type(fresh) is type(present) and isinstance(fresh, LRScheduler) and not isinstance(fresh, ReduceLROnPlateau):
        for _ in range(present.last_epoch):
            fresh.step()
    elif type(fresh) is type(present) and isinstance(fresh, TimmScheduler):
        done = trainer.finished_iter + 1
        if takes_epoch(type(fresh)):
            # The next epoch begins with the next step.
            fresh.step(trainer.epoch + (trainer.epoch_ended and not trainer._running))
            fresh.step_update(done)
        else:
            fresh.step_update(max(done - 1, 0))
    else:
        return present
    return fresh


def set_rates(scheduler: LRMultiplier) -> None:
    """Set learning rates to the present ones of a schedule."""
    for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_lr(), strict=True):
        group["lr"] = lr


def _set(group: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value
