"""Batch-norm statistics that belong to the weights there are, instead of to those of the last steps."""

import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...config import ConfigError, Duration
from ..base import HookBase
from ..common.models import unwrap_model
from ..common.rng import gpus_of, preserve_rng
from ..every import Every
from ..storage.event_storage import EventStorage

__all__ = ["PreciseBN", "StatisticsData", "batch_norms", "cumulative_statistics", "precise_statistics"]

logger = logging.getLogger(__name__)

Loader = Iterable[Any] | Callable[[], Iterable[Any]]


class PreciseBN(HookBase):
    """Computes batch norm's means and variances anew from ``num_iter`` batches, every ``period`` and at the end.

    While training they are running averages, to which weights contributed that are no more. In a config's run it
    stands right before :class:`EvalHook` (``TEST.PRECISE_BN``). Training is not disturbed: batches come from a loader
    of its own, which begins anew each time, in an order that depends on the iteration alone; random numbers are
    put back; ranks agree on the mean of their statistics.

    Acts in ``after_step``; there is no state to save but the model's own.

    Args:
        period: a duration; 0: only at the end.
        model: batch norms in it that are in training mode are computed anew; if there are none, nothing is done.
        data_loader: batches of training data that nobody else reads, or a function that makes the loader when it
            is first needed.
        num_iter: batches to use; at most one pass over a loader that has a length.

    Source: Wu and Johnson, "Rethinking Batch in BatchNorm" (arXiv:2105.07576, section 3), by ``fvcore.nn.precise_bn``.
    """

    def __init__(self, period: "Duration | int | str", model: nn.Module, data_loader: Loader, num_iter: int) -> None:
        if num_iter < 1:
            raise ConfigError(f"PreciseBN: num_iter must be at least 1, not {num_iter}")
        self._every = Every(period, at_end=True)
        self._model = model
        self._data = StatisticsData(data_loader)
        self._num_iter = num_iter
        self._disabled = not batch_norms(model)
        if self._disabled:
            logger.info("PreciseBN does nothing: the model has no batch norm in training mode")

    def before_train(self) -> None:
        self._every.start()

    def after_step(self) -> None:
        if not self._disabled and self._every(self.trainer):
            self.update_stats()

    def update_stats(self) -> None:
        """Compute the statistics now."""
        if self._disabled:
            return
        trainer = self.trainer
        with self._data.batches(trainer, number=trainer.iter, at_most=self._num_iter) as (batches, count):
            precise_statistics(trainer, self._model, batches, count)


class StatisticsData:
    """Training batches for statistics, read beside the training that goes on.

    Args:
        data_loader: an iterable of batches, or a function that makes one.
    """

    def __init__(self, data_loader: Loader) -> None:
        self._make = data_loader
        self._loader: Any = None
        self._generator_state: torch.Tensor | None = None

    @contextmanager
    def batches(self, trainer: Any, number: int, at_most: int | None = None) -> Iterator[tuple[Iterator[Any], int]]:
        """The first batches of a pass, and their number. Random numbers are put back afterwards.

        Args:
            trainer: whose model is given them.
            number: of the pass: the order of samples, and what loader workers draw, depend on it alone.
            at_most: how many batches; None: one whole pass.

        Raises:
            ConfigError: there are none, or nobody knows how many a pass has.
        """
        with preserve_rng(gpus_of(trainer.model)):
            loader = self._positioned(number)
            try:
                length: int | None = len(loader)
            except TypeError:  # a generator, an iterable data set, an endless sampler
                length = trainer.iters_per_epoch if at_most is None else None
            count = min(n for n in (length, at_most, sys.maxsize) if n is not None)
            if count in (0, sys.maxsize):
                raise ConfigError("the data loader for batch-norm statistics has no batches, or no length")
            move = getattr(trainer, "to_device", lambda batch: batch)
            yield map(move, itertools.islice(_again_and_again(loader), count)), count

    def _positioned(self, number: int) -> Any:
        if self._loader is None:
            self._loader = self._make() if callable(self._make) else self._make
            generator = getattr(self._loader, "generator", None)
            self._generator_state = generator.get_state() if generator is not None else None
        loader = self._loader
        if self._generator_state is not None:  # from which each pass draws its workers' seeds
            loader.generator.set_state(self._generator_state)
        owners: list[Any] = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None), loader]
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(number)
                break
        return loader


def _again_and_again(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches, and when it ends from the beginning again."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ConfigError("the data loader for batch-norm statistics gave no batch when it was started over")


def batch_norms(model: nn.Module) -> list[Any]:
    """A model's batch norms that are in training mode and keep statistics."""
    return [module for module in model.modules() if _is_norm(module) and module.training and module.track_running_stats]


def _is_norm(module: Any) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def precise_statistics(trainer: Any, model: nn.Module, batches: Iterator[Any], count: int) -> None:
    """Statistics of the population that batches are drawn from, by fvcore's ``update_bn_stats``.

    Args:
        trainer: runs the model.
        model: batch norms in it that are in training mode are set.
        batches, count: of training data, and how many.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fvcore.nn's import, about torch.jit
        from fvcore.nn.precise_bn import update_bn_stats
    untracked = [module for module in model.modules() if _is_norm(module) and not module.track_running_stats]
    with _statistics_replaced(model), EventStorage(trainer.iter):
        modes = [module.training for module in untracked]
        try:
            for module in untracked:  # fvcore does not know of those; in either mode they do the same
                module.eval()
            update_bn_stats(_Forward(model, trainer), batches, count)
        finally:
            for module, training in zip(untracked, modes, strict=True):
                module.training = training
    _agree(batch_norms(model))


@torch.no_grad()
def cumulative_statistics(trainer: Any, model: nn.Module, batches: Iterator[Any]) -> None:
    """Statistics averaged over batches, each counting the same, as ``torch.optim.swa_utils.update_bn`` does.

    Arguments as for :func:`precise_statistics`; unlike torch's, it leaves batch norms in eval mode as they are.
    """
    forward = _Forward(model, trainer)
    with _statistics_replaced(model) as norms, EventStorage(trainer.iter):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        for batch in batches:
            forward(batch)
    _agree(norms)


class _Forward(nn.Module):
    """A model that is given batches as its trainer gives them to it."""

    def __init__(self, model: nn.Module, trainer: Any) -> None:
        super().__init__()
        self.model = model
        is_trainers = unwrap_model(trainer.model) is unwrap_model(model)
        self._call = getattr(trainer, "forward", model) if is_trainers else model

    def forward(self, batch: Any) -> Any:
        return self._call(batch)


@contextmanager
def _statistics_replaced(model: nn.Module) -> Iterator[list[Any]]:
    """Inside, batch norms get new statistics, and nothing else of them changes.

    Their buffers stay the same tensors, with new values. After an error all is as it was.
    """
    norms: list[Any] = batch_norms(model)
    own = [dict(norm._buffers) for norm in norms]
    before = [{key: value.clone() for key, value in buffers.items() if value is not None} for buffers in own]
    momenta = [norm.momentum for norm in norms]
    forward_hooks = [set(norm._forward_pre_hooks) for norm in norms]
    done = False
    try:
        yield norms
        done = True
    finally:
        for index, norm in enumerate(norms):
            norm.momentum = momenta[index]
            for key in norm._forward_pre_hooks.keys() - forward_hooks[index]:
                del norm._forward_pre_hooks[key]
            for key, old in before[index].items():
                new = norm._buffers[key] if done and key != "num_batches_tracked" else old
                norm._buffers[key] = own[index][key].copy_(new)


@torch.no_grad()
def _agree(norms: list[Any]) -> None:
    """Have all ranks take the statistics over all of their batches together."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    ranks = torch.distributed.get_world_size()
    for norm in norms:
        mean = norm.running_mean / ranks
        torch.distributed.all_reduce(mean)
        variance = (norm.running_var + (norm.running_mean - mean).square()) / ranks
        torch.distributed.all_reduce(variance)
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
