"""Lengths in iterations, from epochs and for another number of processes, and schedules of another length."""

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...config import CfgNode, ConfigError, Duration
from ...config.values import same
from ...hooks.builtin.lr_scheduler import follow_rates
from ...hooks.common import length_of, schedulers_of
from ...hooks.protocol import TrainerProtocol
from ...hooks.writers.periodic import PeriodicWriter
from . import LRMultiplier
from .multi_optimizer import SchedulerList
from .schedules import resolve_lengths

logger = logging.getLogger(__name__)


class ConfiguredTrainer(TrainerProtocol, Protocol):
    """What the start, a resume and reports use of a DefaultTrainer, for type checkers."""

    max_iter: int
    lengths: "Lengths"
    current_run: Any
    batches: Any

    @property
    def device_type(self) -> str: ...
    @property
    def last_eval_results(self) -> Mapping[str, Any]: ...
    def build_lr_scheduler(self, cfg: CfgNode, optimizer: Any) -> Any: ...
    def build_train_loader(self, cfg: CfgNode) -> Any: ...
    def reset_data_loader(self, data_loader_builder: Callable[[], Any]) -> None: ...


class Lengths:
    """The config that a DefaultTrainer's parts are built with, where each length is in iterations.

    They are computed again if a resume changes the length of an epoch, or a script or hook ``trainer.max_iter``.

    Args:
        user_cfg: the config with lengths as they were given.
        iters_per_epoch: iterations in an epoch when the trainer was built; None if unknown.

    Attributes:
        offset: how many more iterations the run has done than its epochs take with the present epoch length. Another
            batch size changes that: then a length in epochs is ``epochs * iters_per_epoch + offset`` iterations.
        cfg: the config with lengths in iterations. Scripts may change the trainer's own.
        text: its YAML text, for checkpoints.
        changed: the given MAX_ITER and the ``max_iter`` that replaced it while the run trained; empty if none did.
    """

    def __init__(self, user_cfg: CfgNode, iters_per_epoch: int | None) -> None:
        self.user_cfg = user_cfg
        self.iters_per_epoch = iters_per_epoch
        self.offset = 0
        self.changed: tuple[object, ...] = ()
        self.use(resolve_lengths(user_cfg, iters_per_epoch))

    def use(self, cfg: CfgNode) -> None:
        """Use a config with lengths in iterations."""
        self.cfg, self.text = cfg, cfg.dump()


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
    size = "MAX_TOKENS" if cfg.DATALOADER.MAX_TOKENS else "BATCH_SIZE"
    if size == "BATCH_SIZE" and cfg.DATALOADER.BATCH_SIZE % old:
        raise ConfigError(
            f"DATALOADER.BATCH_SIZE: {cfg.DATALOADER.BATCH_SIZE} is not a multiple of "
            f"SOLVER.REFERENCE_WORLD_SIZE, {old}"
        )
    scale = num_workers / old
    cfg = cfg.thawed()

    def scaled(length: int | str) -> int | str:
        """Scale a length in iterations; those in epochs or minutes, and fractions of the run, do not change."""
        if Duration.fraction(length):
            return length
        duration = Duration.parse(length)
        return round(duration.value / scale) if duration.unit == "it" else length

    solver = cfg.SOLVER
    cfg.DATALOADER[size] = round(cfg.DATALOADER[size] * scale)
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
    cfg.CHECKPOINT.BEST.PERIOD = scaled(cfg.CHECKPOINT.BEST.PERIOD)
    solver.REFERENCE_WORLD_SIZE = num_workers
    logger.info(
        "Scaled from %d to %d processes: %s %d, learning rate %g, %s iterations",
        old,
        num_workers,
        size,
        cfg.DATALOADER[size],
        solver.BASE_LR,
        solver.MAX_ITER,
    )
    return cfg


def loader_length(loader: Any, limit: int = 0) -> int | None:
    """Return the number of batches in one pass over the data, also if the sampler never ends; None if unknown.

    Args:
        loader: the loader.
        limit: DATALOADER.ITERS_PER_EPOCH: the number if it is not 0.
    """
    if (length := limit or length_of(loader)) is not None:
        return length
    size = length_of(getattr(loader, "dataset", None))
    sampler = getattr(loader, "batch_sampler", None)
    batch_size = getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None)
    return max(1, size // batch_size) if batch_size and size is not None else None


# ---------------------------------------------------------------------------- schedules


def apply_max_iter(trainer: ConfiguredTrainer) -> None:
    """Put a new ``max_iter`` into the config, the schedule and the writers of a DefaultTrainer."""
    lengths = trainer.lengths
    cfg = lengths.user_cfg.thawed()
    cfg.SOLVER.MAX_ITER = max(1, trainer.max_iter)
    lengths.changed = lengths.user_cfg.SOLVER.MAX_ITER, cfg.SOLVER.MAX_ITER
    apply_lengths(trainer, resolve_lengths(cfg, lengths.iters_per_epoch, lengths.offset))


def apply_lengths(trainer: ConfiguredTrainer, cfg: CfgNode) -> None:
    """Use a config with other lengths. hookline's schedules are built again, at the present position; others stay.

    Raises:
        ConfigError: the run is longer, and another schedule would have to change.
    """
    former, lengths = schedulers_of(trainer.scheduler), trainer.lengths
    if all(isinstance(one, LRMultiplier) for one in former):
        with warnings.catch_warnings():  # torch warns that no step of the optimizer comes between
            warnings.simplefilter("ignore")
            for one in former:
                follow_rates(one)
            rates = [group["lr"] for group in trainer.optimizer.param_groups]
            built = trainer.build_lr_scheduler(cfg, trainer.optimizer)
            trainer.scheduler = SchedulerList(built) if isinstance(built, list | tuple | Mapping) else built
        for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # a new schedule sets those of its beginning
        for new, old in zip(schedulers_of(trainer.scheduler), former, strict=True):
            new.load_state_dict(old.state_dict())
            new.step(new.last_epoch)
    elif trainer.max_iter > lengths.cfg.SOLVER.MAX_ITER:
        check_kept_schedules(trainer, lengths.cfg.SOLVER, cfg.SOLVER)
    lengths.use(cfg)
    trainer.cfg = trainer.cfg.thawed()  # a copy: a subclass may have set its own config
    trainer.cfg.SOLVER = cfg.SOLVER.clone()
    for hook in trainer.find_hooks(PeriodicWriter):
        hook.set_max_iter(trainer.max_iter)


def check_kept_schedules(trainer: ConfiguredTrainer, before: CfgNode, now: CfgNode) -> None:
    """Check that torch's and timm's schedules may stay as they are: their state holds what they were built with.

    Args:
        trainer: a DefaultTrainer.
        before, now: the former and the present SOLVER, with lengths in iterations.

    Raises:
        ConfigError: one was built from a setting that has changed, such as an argument "end" of a longer run; or a
            longer run has one, and one of hookline's, too, or OneCycleLR, which cannot be stepped beyond its end.
    """
    schedules = schedulers_of(trainer.scheduler)
    kept = [type(one).__name__ for one in schedules if not isinstance(one, LRMultiplier)]
    if not kept:
        return
    changed = [key for key in ("BASE_LR", "LR_SCHEDULER_ARGS", "OPTIMIZERS") if not same(before.get(key), now[key])]
    if before.MAX_ITER < now.MAX_ITER:
        changed.append("MAX_ITER")
    by_iteration = now.LR_SCHEDULER_INTERVAL == "iteration"
    ends = by_iteration and any(getattr(one, "total_steps", now.MAX_ITER) < now.MAX_ITER for one in schedules)
    if changed == ["MAX_ITER"] and len(kept) == len(schedules) and not ends:
        logger.warning(
            "SOLVER.MAX_ITER: %s stays as it was built, for a run of %d iterations", ", ".join(kept), before.MAX_ITER
        )
    elif changed:
        trainer.max_iter = before.MAX_ITER
        raise ConfigError(
            f"{', '.join(f'SOLVER.{key}' for key in changed)}: {', '.join(kept)} cannot follow another value (the run "
            f"was to have {before.MAX_ITER} iterations). Change it back; or use a schedule of hookline; or start a new "
            "run with MODEL.WEIGHTS and MODEL.WEIGHTS_OPTIMIZER: True"
        )
