"""What a run on disk was: its config, its ranks, and which samples a step reads, from the sampler alone."""

import glob
import os
from collections.abc import Callable
from itertools import islice
from typing import Any

from ...config import CfgNode, ConfigError, UnknownKeyError, get_cfg
from ...hooks.common import length_of
from ..checkpoint.find_checkpoint import saved_run
from ..data import build_train_loader
from ..data.batch_sampler import GlobalBatchSampler
from ..solver.lengths import loader_length
from ..solver.schedules import resolve_lengths


def run_config(run: str, cfg: CfgNode | None = None) -> CfgNode:
    """Return the config in ``config.yaml`` of a run.

    Args:
        run: the folder of the run.
        cfg: the config that the file is merged into, with the project's own keys. Default: ``get_cfg()``.

    Raises:
        ConfigError: there is no such run, or its config is invalid.
    """
    path = os.path.join(run, "config.yaml")
    if not os.path.isfile(path):
        raise ConfigError(f"{run}: no run of hookline is here (it has no config.yaml)")
    cfg = get_cfg() if cfg is None else cfg.thawed()
    try:
        cfg.merge_from_file(path)
    except UnknownKeyError as error:
        raise UnknownKeyError(
            f"{error}\nIf the run's script adds the key, call the script, which ends with run(Trainer, args, cfg): "
            f"python SCRIPT --config-file {path} with --replay N or --samples N"
        ) from None
    return cfg


def ranks_of(run: str, checkpoint: str = "") -> int:
    """Return the number of ranks of a run, from one of its checkpoints, or else from its log files."""
    ranks = saved_run(checkpoint).get("world_size", 0) if checkpoint else 0
    return int(ranks) or 1 + len(glob.glob(os.path.join(glob.escape(run), "log.txt.rank*")))


def samples_at(
    run: str, iteration: int, cfg: CfgNode | None = None, build: Callable[[CfgNode], Any] = build_train_loader
) -> list[int]:
    """Return the indices of the samples in the global batch of a step, which may be in the future.

    Args:
        run: the folder of the run.
        iteration: the step.
        cfg: see :func:`~hookline.engine.program.replay`.
        build: builds the loader, such as ``build_train_loader`` of the run's trainer.

    Raises:
        ConfigError: there is no such run or step, or its data has no indices.
    """
    cfg = run_config(run, cfg)
    if cfg.SOLVER.REFERENCE_WORLD_SIZE:
        raise ConfigError(
            f"{run}: SOLVER.REFERENCE_WORLD_SIZE scales its batch size by the number of ranks, which the sampler "
            "alone does not know: use hookline replay"
        )
    cfg.DATALOADER.NUM_WORKERS = 0
    loader = build(cfg)
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, GlobalBatchSampler):
        raise ConfigError(
            f"{run}: the samples of its steps are not known: they are for a map-style data set that DATASETS.TRAIN "
            "names, not for an iterable one or a loader of your own: use hookline replay"
        )
    length = cfg.DATALOADER.ITERS_PER_EPOCH or loader_length(loader)
    steps = resolve_lengths(cfg, length).SOLVER.MAX_ITER
    if not 0 <= iteration < steps:
        raise ConfigError(f"iteration {iteration}: the run has the iterations 0 to {steps - 1}")
    epoch, position = 0, iteration
    if length and length_of(sampler) is not None:  # a sampler that never ends is one stream for all epochs
        epoch, position = divmod(iteration, length)
    sampler.set_epoch(epoch)
    return next(islice(sampler, position, None), [])
