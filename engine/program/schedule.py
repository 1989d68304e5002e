"""The learning rates of a run, from its config, without training."""

import argparse
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...config import ConfigError
from ...hooks import CallbackHook
from ...hooks.control.lr_scheduler import LRScheduler
from ...runs.reading import Curve, Run
from ..defaults import DefaultTrainer
from ..options import set_up_probe
from ..simple_trainer import SimpleTrainer

__all__ = ["schedule_of"]


def schedule_of(config_file: str, opts: Sequence[str] = ()) -> Run:
    """Return the learning rates of a config's run, as curves that can be drawn like those of a run.

    Builds data, model and optimizer, and counts through the steps.

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
    trainer = _WithoutSteps(set_up_probe(args))
    schedules = trainer.find_hooks(LRScheduler)
    for hook in schedules:
        if hook._metric or hook._interval == "evaluation":
            follows = f"the metric {hook._metric!r}" if hook._metric else "evaluations"
            raise ConfigError(
                f"SOLVER.LR_SCHEDULER_NAME: {type(hook.scheduler).__name__} follows {follows}: its rates are known "
                "only in training"
            )
    rates: dict[str, list[list[float]]] = {hook._name: [] for hook in schedules}

    def note(trainer: DefaultTrainer) -> None:
        for hook in schedules:
            groups = hook._find_optimizer().param_groups
            shown = hook.get_best_param_group_id(hook._find_optimizer())
            order = [groups[shown], *(group for i, group in enumerate(groups) if i != shown)]
            rates[hook._name].append([float(group["lr"]) for group in order])

    for hook in [*trainer._hooks]:
        trainer.remove_hook(hook)
    trainer.register_hooks([CallbackHook(before_step=note), *schedules])
    length = trainer.iters_per_epoch
    trainer.reset_data_loader(lambda: [None] * (length or 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of schedules without updates
        SimpleTrainer.train(trainer, 0, trainer.max_iter)
    curves: dict[str, Curve] = {}
    for name, rows in rates.items():
        reported, *others = np.array(rows).T
        curves[name] = Curve(np.arange(len(reported)), reported)
        for number, values in enumerate(others, 1):
            curves.setdefault(_name(name, reported, values, number), Curve(np.arange(len(values)), values))
    name = os.path.splitext(os.path.basename(config_file))[0]
    return Run(config_file, f"schedule of {name}", curves, {}, length and float(length), trainer.max_iter)


class _WithoutSteps(DefaultTrainer):
    """Counts steps, and does nothing in them."""

    def run_step(self) -> None:
        self.fetch()


def _name(name: str, reported: np.ndarray, values: np.ndarray, number: int) -> str:
    """Name a parameter group's rate. Groups with equal rates have equal names."""
    if np.allclose(values, reported, rtol=1e-9):
        return name
    factors: Any = values[reported > 0] / reported[reported > 0]
    if len(factors) and np.allclose(factors, factors[0]):
        return f"{name} x{factors[0]:.4g}"
    return f"{name} of group {number}"
