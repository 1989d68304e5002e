"""Find a learning rate, or the largest batch: try steps of a run that is thrown away."""

import logging
import math
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from ...config import CfgNode, ConfigError
from ...config.values import ObjectName
from ...hooks import CallbackHook
from ...hooks.common import preserve_rng
from .. import comm
from ..defaults import DefaultTrainer
from ..run import Run
from ..setup.check import check_values, overridden_builders
from ..simple_trainer import SimpleTrainer
from ..step.nonfinite import NonFinitePolicy

logger = logging.getLogger(__name__)


def _trial(name: str, cfg: CfgNode, trainer: type[DefaultTrainer]) -> DefaultTrainer:
    """Build the trainer of a config, with MODEL.WEIGHTS, to try steps with: without hooks, and it writes nothing."""
    if not isinstance(cfg, CfgNode):
        raise ConfigError(f"{name}: takes the config of a run, and builds the run itself; not a {type(cfg).__name__}")
    if isinstance(cfg.MODEL.NAME, ObjectName) and cfg.MODEL.NAME.is_component:
        raise ConfigError(f"{name}: the model is an object, which the steps would change: pass its class instead")
    cfg = cfg.clone()
    check_values(cfg, overridden_builders(trainer, DefaultTrainer))
    run = Run(cfg, "dry")
    run.open(cfg)
    opened, Run.opened = Run.opened, run
    try:
        trial = trainer(cfg)
    finally:
        Run.opened = opened  # a script's run is that of its own trainer
    trial.resume_or_load(resume=False)
    for hook in list(trial.hooks.hooks):
        trial.remove_hook(hook)
    trial.nonfinite = NonFinitePolicy("raise")
    trial.gather_metric_period = 1
    return trial


@dataclass(frozen=True)
class LRSweep:
    """Result of :func:`find_lr`.

    Attributes:
        lrs: the learning rates, in ascending order.
        losses: the loss of the step with each rate.
        smoothed: the losses' running average.
        suggestion: the rate at which the loss falls fastest; None if it does not fall.
    """

    lrs: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float | None


def find_lr(
    cfg: CfgNode,
    min_lr: float = 1e-7,
    max_lr: float = 10.0,
    num_iter: int = 100,
    smoothing: float = 0.98,
    stop_factor: float | None = 4.0,
    trainer: type[DefaultTrainer] = DefaultTrainer,
) -> LRSweep:
    """Train for some steps with a rising learning rate, and suggest a rate (Smith, arXiv:1506.01186, section 3.3).

    The rate rises exponentially; parameter groups keep the ratios of their rates. The run is built for the search:
    hooks are not called, nothing is written, and random generators are as before afterwards.

    Args:
        cfg: the config of the run, which is not changed. With several ranks, all of them call this.
        min_lr: the first rate.
        max_lr: the last rate.
        num_iter: number of steps.
        smoothing: factor of the running average, in [0, 1).
        stop_factor: stop when the smoothed loss is this many times its minimum, or not finite. None: only in the
            second case.
        trainer: the class of the run's trainer.

    Raises:
        ConfigError: an argument makes no sense.

    Example::

        sweep = find_lr(cfg)
        print(sweep.suggestion)
    """
    if not (0 < min_lr < max_lr and math.isfinite(max_lr)):
        raise ConfigError(f"find_lr: min_lr must be positive and less than max_lr; got {min_lr} and {max_lr}")
    if num_iter < 3 or not 0 <= smoothing < 1:
        raise ConfigError(
            f"find_lr: num_iter must be at least 3 and smoothing in [0, 1); got {num_iter} and {smoothing}"
        )
    rates = [min_lr * (max_lr / min_lr) ** (i / (num_iter - 1)) for i in range(num_iter)]
    lrs: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []

    def set_rate(trial: DefaultTrainer) -> None:
        for group, factor in zip(trial.optimizer.param_groups, factors, strict=True):
            group["lr"] = rates[trial.iter] * factor

    def keep_loss(trial: DefaultTrainer) -> None:
        loss = float(np.mean(comm.all_gather(trial.storage.history("total_loss").latest())))
        if not math.isfinite(loss):
            trial.stop("the loss is not finite")
            return
        before = smoothed[-1] * (1 - smoothing ** len(losses)) if losses else 0.0  # without the correction
        lrs.append(rates[trial.iter])
        losses.append(loss)
        smoothed.append((smoothing * before + (1 - smoothing) * loss) / (1 - smoothing ** len(losses)))
        if stop_factor is not None and smoothed[-1] > stop_factor * min(smoothed):
            trial.stop("the loss has risen")

    with preserve_rng():
        trial = _trial("find_lr", cfg, trainer)
        base = cfg.SOLVER.BASE_LR
        base_rates = [float(group.get("initial_lr", group["lr"])) for group in trial.optimizer.param_groups]
        factors = [rate / base if base else 1.0 for rate in base_rates]
        trial.register_hooks([CallbackHook(before_step=set_rate, after_step=keep_loss)])
        with suppress(FloatingPointError):
            SimpleTrainer.train(trial, 0, num_iter)
    return LRSweep(lrs, losses, smoothed, _steepest(lrs, losses))


def _steepest(lrs: list[float], losses: list[float]) -> float | None:
    """Return the rate at which the losses fall fastest over log(lr), before they are lowest.

    Single losses are noise: means and slopes are those of a fifth of the steps around a rate, without the height to
    which the loss rises at last.
    """
    width = max(1, len(lrs) // 10)
    losses = np.minimum(losses, max(losses[: 2 * width + 1], default=0.0)).tolist()
    means, slopes = {}, {}
    for i in range(width, len(lrs) - width):
        near = slice(i - width, i + width + 1)
        means[i] = np.mean(losses[near])
        slopes[i] = np.polyfit(np.log(lrs[near]), losses[near], 1)[0]
    lowest = min(means, key=means.__getitem__, default=0)
    best = min((i for i in slopes if i <= lowest), key=slopes.__getitem__, default=None)
    return None if best is None or slopes[best] >= 0 else lrs[best]


def find_batch_size(
    cfg: CfgNode, most: int | None = None, steps: int = 2, trainer: type[DefaultTrainer] = DefaultTrainer
) -> int:
    """Return the largest ``DATALOADER.BATCH_SIZE`` whose steps fit into memory.

    Sizes are tried from ``DATALOADER.BATCH_SIZE`` on: doubled until a step runs out of memory, then halved in between,
    to about 6 %. The run is built for the search, as by :func:`find_lr`.

    Args:
        cfg: the config of the run, which is not changed. One process.
        most: the largest size to try. Default: the number of samples.
        steps: steps with each size. The first creates the optimizer's state, so at least 2.
        trainer: the class of the run's trainer.

    Raises:
        ConfigError: not even one sample fits, there are several processes, or the run is on the CPU.
    """
    if comm.get_world_size() > 1:
        raise ConfigError("find_batch_size: use one process; multiply the result by the number of ranks")
    if cfg.DATALOADER.MAX_TOKENS:
        raise ConfigError("find_batch_size: searches BATCH_SIZE, and DATALOADER.MAX_TOKENS decides the batches here")
    with preserve_rng():
        trial = _trial("find_batch_size", cfg, trainer)
        if trial.device_type == "cpu":
            raise ConfigError("find_batch_size: finds what fits into a GPU's memory; the run's device is the CPU")
        try:
            samples = len(getattr(trial.data_loader, "dataset", None))  # type: ignore[arg-type]
        except TypeError:  # None, or an iterable data set
            samples = 2**20
        most = samples if most is None else min(most, samples)
        fits, fails = 0, most + 1
        size = min(cfg.DATALOADER.BATCH_SIZE, most)
        while fails - fits > max(1, fits // 16):
            if _fits(trial, size, steps):
                fits = size
            else:
                fails = size
            size = max(1, min(2 * fits, most) if fails == most + 1 else (fits + fails) // 2)
    if not fits:
        raise ConfigError("find_batch_size: not even a batch of one sample fits into memory")
    return fits


def _fits(trial: DefaultTrainer, size: int, steps: int) -> bool:
    cfg = trial.cfg.thawed()
    cfg.DATALOADER.BATCH_SIZE, cfg.DATALOADER.DROP_LAST = size, True
    trial.reset_data_loader(lambda: trial.build_train_loader(cfg))
    fits = True
    try:
        SimpleTrainer.train(trial, 0, steps)
    except RuntimeError as error:  # cuBLAS and cuDNN have errors of their own
        if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
            raise
        fits = False
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    logger.info("A batch of %d samples %s", size, "fits" if fits else "does not fit")
    return fits
