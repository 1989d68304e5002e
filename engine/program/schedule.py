"""The learning rates of a run, from its config, without training."""

import argparse
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...config import ConfigError, Duration
from ...hooks.common.models import TimmScheduler, takes_epoch
from ...hooks.control.lr_scheduler import LRScheduler
from ...runs.reading import Curve, Run
from ..defaults import DefaultTrainer
from ..options import set_up_probe

__all__ = ["schedule_of"]


def schedule_of(config_file: str, opts: Sequence[str] = ()) -> Run:
    """Return the learning rates of a config's run, as curves that can be drawn like those of a run.

    Builds data, model and optimizer, and steps the schedule.

    Args:
        config_file: the YAML file.
        opts: keys of the config and their values, as pairs.

    Returns:
        The curve ``lr`` that a run would log, or one for each of several optimizers. Parameter groups with other rates
        have curves named by their multiple of it, such as ``lr x0.1``.

    Raises:
        ConfigError: the config is wrong; or its rates are only known in training.
    """
    args = argparse.Namespace(config_file=config_file, opts=list(opts), eval_only=False, predict=False, resume=False)
    trainer = DefaultTrainer(set_up_probe(args))
    rates: dict[str, list[list[float]]] = {}
    steps: list[tuple[Callable[[], list[float]], str, Callable[[int], None]]] = []
    for hook in trainer.find_hooks(LRScheduler):
        if hook._metric:
            raise ConfigError(
                f"SOLVER.LR_SCHEDULER_NAME: {type(hook.scheduler).__name__} follows the metric {hook._metric!r}: its "
                "rates are known only in training"
            )
        groups = hook._find_optimizer().param_groups
        shown = hook.get_best_param_group_id(hook._find_optimizer())
        order = [groups[shown], *(group for i, group in enumerate(groups) if i != shown)]
        steps.append((partial(_rates, order), hook._name, _stepper(hook, trainer)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of schedules without updates
        for iteration in range(trainer.max_iter):
            for read, name, step in steps:
                rates.setdefault(name, []).append(read())
                step(iteration)
    curves: dict[str, Curve] = {}
    for name, rows in rates.items():
        reported, *others = np.array(rows).T
        curves[name] = Curve(np.arange(len(reported)), reported)
        for number, values in enumerate(others, 1):
            curves.setdefault(_name(name, reported, values, number), Curve(np.arange(len(values)), values))
    name = os.path.splitext(os.path.basename(config_file))[0]
    length = trainer.iters_per_epoch
    return Run(config_file, f"schedule of {name}", curves, {}, length and float(length), trainer.max_iter)


def _rates(groups: list[dict[str, Any]]) -> list[float]:
    return [float(group["lr"]) for group in groups]


def _stepper(hook: LRScheduler, trainer: DefaultTrainer) -> Callable[[int], None]:
    """Return a function that does after an iteration what the hook does in training."""
    scheduler, epoch = hook.scheduler, trainer.iters_per_epoch
    if isinstance(scheduler, TimmScheduler) and not hasattr(scheduler, "get_last_lr"):

        def step_timm(iteration: int) -> None:
            with_epochs = takes_epoch(type(scheduler))
            scheduler.step_update(iteration + 1 if with_epochs else iteration)
            if with_epochs and epoch and (iteration + 1) % epoch == 0:
                scheduler.step((iteration + 1) // epoch)

        return step_timm
    period: int | None = 1
    if hook._interval == "epoch":
        period = epoch
    elif hook._interval == "evaluation":
        period = Duration.parse(trainer.cfg.TEST.EVAL_PERIOD).iterations(epoch)

    def step(iteration: int) -> None:
        if period and (iteration + 1) % period == 0:
            scheduler.step()

    return step


def _name(name: str, reported: np.ndarray, values: np.ndarray, number: int) -> str:
    """Name a parameter group's rate. Groups with equal rates have equal names."""
    if np.allclose(values, reported, rtol=1e-9):
        return name
    factors: Any = values[reported > 0] / reported[reported > 0]
    if len(factors) and np.allclose(factors, factors[0]):
        return f"{name} x{factors[0]:.4g}"
    return f"{name} of group {number}"
