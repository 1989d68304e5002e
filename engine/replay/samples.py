"""What a run on disk was: its config, its ranks, and which samples a step reads, from the sampler alone."""

import glob
import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from ...config import CfgNode, ConfigError, UnknownKeyError, get_cfg
from ..checkpoint.candidates import saved_ranks
from ..data import build_train_loader
from ..data.batch_sampler import GlobalBatchSampler, RankBatchSampler, takes_start
from ..data.epoch_iterator import reason_without_indices
from ..data.loader import length_of
from ..resume.lengths import loader_length, resolve_lengths

__all__ = ["each_iteration_of", "iterations_of", "ranks_of", "run_config", "samples_at"]


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
    cfg = get_cfg() if cfg is None else cfg.clone()
    cfg.defrost()
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
    ranks = saved_ranks(checkpoint) if checkpoint else 0
    return ranks or 1 + len(glob.glob(os.path.join(glob.escape(run), "log.txt.rank*")))


def samples_at(
    run: str, iteration: int, cfg: CfgNode | None = None, build: Callable[[CfgNode], Any] = build_train_loader
) -> list[int]:
    """Return the indices of the samples in the global batch of a step, which may be in the future.

    A run whose length is a time may end before the step.

    Args:
        run: the folder of the run.
        iteration: the step.
        cfg: see :func:`~hookline.engine.replay.replay`.
        build: builds the loader, such as ``build_train_loader`` of the run's trainer.

    Raises:
        ConfigError: there is no such run or step, or its data has no indices.
    """
    return _Stream(run, cfg, build).at(iteration)


def iterations_of(run: str, sample: int, cfg: CfgNode | None = None) -> list[int]:
    """Return all steps of a run that read a sample.

    If the length of the run is a time, these are the steps up to its newest checkpoint, or its last row of metrics.

    Args:
        run, cfg: see :func:`samples_at`.
        sample: its index in the data set.

    Raises:
        ConfigError: as for :func:`samples_at`, or there is no such sample.
    """
    return list(each_iteration_of(run, sample, cfg))


def each_iteration_of(run: str, sample: int, cfg: CfgNode | None = None) -> Iterator[int]:
    """Yield what :func:`iterations_of` returns, each step as soon as it is found."""
    stream = _Stream(run, cfg)
    if not 0 <= sample < stream.size:
        raise ConfigError(f"sample {sample}: the data set has the samples 0 to {stream.size - 1}")
    yield from (number for number, batch in enumerate(stream.all()) if sample in batch)


class _Stream:
    """The global batches of a run."""

    def __init__(self, run: str, cfg: CfgNode | None, build: Callable[[CfgNode], Any] = build_train_loader) -> None:
        cfg = run_config(run, cfg)
        if cfg.SOLVER.REFERENCE_WORLD_SIZE:
            raise ConfigError(
                f"{run}: SOLVER.REFERENCE_WORLD_SIZE scales its batch size by the number of ranks, which the sampler "
                "alone does not know: use hookline replay"
            )
        cfg.DATALOADER.NUM_WORKERS = 0
        loader = build(cfg)
        sampler = getattr(loader, "batch_sampler", None)
        if reason := reason_without_indices(loader):
            raise ConfigError(f"{run}: its training data has no indices: {reason}")
        if not isinstance(sampler, GlobalBatchSampler) or isinstance(sampler, RankBatchSampler):
            raise ConfigError(
                f"{run}: {type(sampler).__name__} chooses its samples, and no sampler of hookline: use hookline replay"
            )
        length = cfg.DATALOADER.ITERS_PER_EPOCH or loader_length(loader)
        self._sampler, self._own_length = sampler, length_of(sampler)  # None: one stream for all epochs
        self._length = length if length is None or self._own_length is None else min(length, self._own_length)
        self.max_iter: int = resolve_lengths(cfg, length).SOLVER.MAX_ITER
        self.size = len(loader.dataset)

    def at(self, iteration: int) -> list[int]:
        if not 0 <= iteration < self.max_iter:
            raise ConfigError(f"iteration {iteration}: the run has the iterations 0 to {self.max_iter - 1}")
        if self._length is None or self._own_length is None:  # one stream
            epoch, position = 0, iteration
        else:
            epoch, position = divmod(iteration, self._length)
        return next(self._batches(epoch, position), [])

    def all(self) -> Iterator[list[int]]:
        left, epoch = self.max_iter, 0
        whole = self._length is None or self._own_length is None
        while left > 0:
            count = left if whole else min(left, self._length or left)
            yield from islice(self._batches(epoch, 0), count)
            left, epoch = left - count, epoch + 1

    def _batches(self, epoch: int, position: int) -> Iterator[list[int]]:
        sampler = self._sampler
        start = position * sampler.batch_size
        if takes_start(sampler.sampler):
            sampler.set_epoch(epoch, start)
            return iter(sampler)
        sampler.set_epoch(epoch)
        return islice(iter(sampler), position, None)
