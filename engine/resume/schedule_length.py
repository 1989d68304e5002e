"""Schedules of a run whose length has changed."""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...config import CfgNode, ConfigError
from ...hooks.common.models import TimmScheduler, takes_epoch
from ...hooks.writers.periodic import PeriodicWriter
from ..solver import LRMultiplier, SchedulerList
from ..solver.parts import solver_parts
from ..solver.several import one_or_several, schedulers_of
from .changes import set_rates
from .lengths import resolve_lengths

__all__ = ["apply_changes_of_schedule", "apply_max_iter", "rebuild_schedule"]

logger = logging.getLogger(__name__)

# Attributes of torch's and timm's schedulers that hold the length of the whole schedule.
_LENGTHS = ("T_max", "total_steps", "total_iters", "t_initial")


@dataclass(frozen=True)
class _Position:
    """Where a run is: finished iterations and epochs, and iterations of an epoch (None if unknown)."""

    iterations: int
    epochs: int
    iters_per_epoch: int | None


def apply_max_iter(trainer: Any) -> None:
    """Put a new ``max_iter`` into the config, the schedule and the writers of a DefaultTrainer.

    Raises:
        ConfigError: the run cannot be longer, since its schedule has a fixed length. ``max_iter`` is as before.
    """
    before, cfg = trainer.cfg, _config_of_length(trainer)
    try:
        rebuild_schedule(trainer, before, cfg)
    except ConfigError:
        trainer._max_iter = before.SOLVER.MAX_ITER
        raise
    trainer._set_config(cfg)
    for hook in trainer.find_hooks(PeriodicWriter):
        hook.set_max_iter(trainer.max_iter)


def _config_of_length(trainer: Any) -> CfgNode:
    """Return the config with MAX_ITER as the trainer has it, and what depends on it."""
    cfg, given = trainer.cfg.clone(), trainer.given.clone()
    cfg.defrost()
    given.defrost()
    given.SOLVER.MAX_ITER = cfg.SOLVER.MAX_ITER = max(1, trainer.max_iter)
    resolved = resolve_lengths(given, trainer.iters_per_epoch, trainer._segments).SOLVER
    cfg.SOLVER.LR_SCHEDULER_ARGS, cfg.SOLVER.OPTIMIZERS = resolved.LR_SCHEDULER_ARGS, resolved.OPTIMIZERS
    if trainer.cfg.is_frozen():
        cfg.freeze()
    return cfg


def rebuild_schedule(trainer: Any, old: CfgNode, new: CfgNode) -> None:
    """Replace the schedule of the config ``old`` by that of ``new``, at the present position.

    Raises:
        ConfigError: the schedule has a fixed length. Nothing has changed.
    """
    done = trainer.finished_iter + 1
    own = all(isinstance(one, LRMultiplier) for one in schedulers_of(trainer.scheduler))
    if not own and trainer.max_iter <= done:  # torch's cannot be stepped beyond their end
        return
    epochs = trainer.epoch + (trainer.epoch_ended and not trainer._running)  # the next one begins with the next step
    position = _Position(done, epochs, trainer.iters_per_epoch)
    build = partial(trainer.build_lr_scheduler, new, trainer.optimizer)
    trainer.scheduler = _rebuilt(trainer.scheduler, build, trainer.optimizer, position, old, new)


def apply_changes_of_schedule(trainer: Any, length_before: int) -> None:
    """Rebuild torch's and timm's schedules after a resume with another config.

    Args:
        trainer: a DefaultTrainer.
        length_before: MAX_ITER of the checkpoint's config.
    """
    before = [one for one in schedulers_of(trainer.scheduler) if not isinstance(one, LRMultiplier)]
    if not before:
        return
    earlier = trainer.cfg.clone()
    earlier.defrost()
    earlier.SOLVER.MAX_ITER = length_before
    rebuild_schedule(trainer, earlier, trainer.cfg)
    for one in before:
        if any(one is kept for kept in schedulers_of(trainer.scheduler)):
            logger.warning("%s keeps the checkpoint's schedule", type(one).__name__)


def _rebuilt(
    scheduler: Any, build: Callable[[], Any], optimizer: Any, position: _Position, old: CfgNode, new: CfgNode
) -> Any:
    """Return the schedules of another length, at the position of the present ones, and set the rates to theirs.

    hookline's own schedules are functions of the position. torch's are stepped to it. ReduceLROnPlateau has no length,
    and an object that was given to the trainer cannot be built again: they are kept.

    Args:
        scheduler: the present schedules.
        build: builds the new ones.
        optimizer: their optimizer or optimizers.
        position: where the run is.
        old: the config of ``scheduler``.
        new: that of what ``build`` returns.

    Raises:
        ConfigError: the run becomes longer, and a schedule keeps the old length. Nothing has changed.
    """
    before = [(group, _copy(group)) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        _set(group, {"lr": group.get("initial_lr", group["lr"])})
    try:
        # The build's warnings were given when the run began; torch's is that no step of the optimizer came between.
        with _without_warnings("schedules", "scheduling"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = one_or_several(build(), SchedulerList)
            named = result.named if isinstance(result, SchedulerList) else {"": result}
            present = scheduler.named if isinstance(scheduler, SchedulerList) else {"": scheduler}
            if new.SOLVER.MAX_ITER > old.SOLVER.MAX_ITER:
                for name, one in named.items():
                    _check_length(one, solver_parts(old).get(name, old), position.iters_per_epoch)
            for name, one in named.items():
                named[name] = _at_position(one, present[name], position)
    except BaseException:
        for group, values in before:
            _set(group, values)
        raise
    kept = {id(group) for name in named if named[name] is present[name] for group in _groups(named[name])}
    for group, values in before:
        if id(group) in kept:
            _set(group, values)
    return result if isinstance(result, SchedulerList) else named[""]


def _at_position(fresh: Any, present: Any, position: _Position) -> Any:
    """Return ``fresh`` at the position of ``present``, or ``present`` if it has to stay."""
    if fresh is present or isinstance(fresh, ReduceLROnPlateau) or type(fresh) is not type(present):
        return present
    if isinstance(fresh, LRMultiplier):
        fresh.load_state_dict(present.state_dict())
        set_rates(fresh)
    elif isinstance(fresh, LRScheduler):
        for _ in range(present.last_epoch):
            fresh.step()
    elif isinstance(fresh, TimmScheduler):
        if takes_epoch(type(fresh)):
            fresh.step(position.epochs)
            fresh.step_update(position.iterations)
        else:
            fresh.step_update(max(position.iterations - 1, 0))
    else:
        return present
    return fresh


def _check_length(scheduler: Any, cfg: CfgNode, iters_per_epoch: int | None) -> None:
    """Raise an error if a schedule has the length of the whole run of ``cfg``, as a number."""
    length = cfg.SOLVER.MAX_ITER
    lengths = [length] if isinstance(scheduler, LRScheduler) and cfg.SOLVER.LR_SCHEDULER_INTERVAL == "iteration" else []
    if not lengths and iters_per_epoch:
        lengths = [math.ceil(length / iters_per_epoch)]
    for name in _LENGTHS:
        if getattr(scheduler, name, None) in lengths:
            kind = type(scheduler).__name__
            raise ConfigError(
                f"max_iter: the run cannot be longer than {length} iterations, since its schedule {kind} was built for "
                f'them ({name}={getattr(scheduler, name)}). Name the schedule with {{{name}: "end"}}, which follows '
                "the length of the run"
            )


def _groups(scheduler: Any) -> list[dict[str, Any]]:
    optimizer = getattr(scheduler, "optimizer", None)
    return optimizer.param_groups if optimizer is not None else []


def _copy(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter group without its parameters."""
    items = ((key, value) for key, value in group.items() if key != "params")
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in items}


def _set(group: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


@contextmanager
def _without_warnings(*modules: str) -> Iterator[None]:
    loggers = [logging.getLogger(f"{LRMultiplier.__module__.rpartition('.')[0]}.{name}") for name in modules]
    before = [one.disabled for one in loggers]
    for one in loggers:
        one.disabled = True
    try:
        yield
    finally:
        for one, disabled in zip(loggers, before, strict=True):
            one.disabled = disabled
