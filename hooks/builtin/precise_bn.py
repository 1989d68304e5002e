"""Batch norm statistics computed with the current weights."""

import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...config import ConfigError, Duration
from ..base import Every, HookBase, Period
from ..common import length_of, preserve_rng, unwrap_model
from ..event_storage import EventStorage
from ..protocol import TrainerProtocol

logger = logging.getLogger(__name__)

Loader = Iterable[Any] | Callable[[], Iterable[Any]]


class PreciseBN(HookBase):
    """Recomputes batch norm's means and variances from ``num_iter`` batches, every ``period`` and at the end.

    During training they are running averages, which earlier weights contributed to. ``TEST.PRECISE_BN`` puts this hook
    right before :class:`EvalHook`. Training is not affected: the hook has its own loader, which restarts each time in
    an order that depends only on the iteration, and random states are restored. Statistics are averaged over ranks.

    Acts in ``after_step``. Saves nothing: the statistics are in the model.

    Args:
        period: a duration; 0: only at the end.
        model: its batch norms in training mode are recomputed.
        data_loader: batches of training data, or a function that makes the loader when it is first needed. No other
            code may read the loader.
        num_iter: number of batches; at most one pass over a loader that has a length.

    Source: Wu and Johnson, "Rethinking Batch in BatchNorm" (arXiv:2105.07576, section 3), by ``fvcore.nn.precise_bn``.
    """

    _period = Period(at_end=True)

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
        """Recompute the statistics now."""
        trainer = self.trainer
        with self._data.batches(trainer, number=trainer.iter, at_most=self._num_iter) as (batches, count):
            precise_statistics(trainer, self._model, batches, count)


class StatisticsData:
    """Reads training batches for statistics without affecting training.

    Args:
        data_loader: an iterable of batches, or a function that makes one.
    """

    def __init__(self, data_loader: Loader) -> None:
        self._make = data_loader
        self._loader: Any = None
        self._generator_state: torch.Tensor | None = None

    @contextmanager
    def batches(
        self, trainer: TrainerProtocol, number: int, at_most: int | None = None
    ) -> Iterator[tuple[Iterator[object], int]]:
        """Give the first batches of a pass and their number, and restore random states afterwards.

        Args:
            trainer: the trainer; batches are moved to its device.
            number: number of the pass. The order of samples and the random numbers of workers depend only on it.
            at_most: how many batches; None: a whole pass.

        Raises:
            ConfigError: there are no batches, or the length of a pass is unknown.
        """
        with preserve_rng():
            loader = self._positioned(number)
            length = length_of(loader)
            if length is None and at_most is None:
                length = trainer.iters_per_epoch
            counts = [count for count in (length, at_most) if count]
            if not counts or length == 0:
                raise ConfigError("the data loader for batch-norm statistics has no batches, or no length")
            count = min(counts)
            move = getattr(trainer, "to_device", lambda batch: batch)
            repeated = (batch for _ in range(count) for batch in loader)  # an iterable may be shorter
            yield map(move, itertools.islice(repeated, count)), count

    def _positioned(self, number: int) -> Any:
        if self._loader is None:
            self._loader = self._make() if callable(self._make) else self._make
            generator = getattr(self._loader, "generator", None)
            self._generator_state = generator.get_state() if generator is not None else None
        loader = self._loader
        if hasattr(loader, "follow_length"):  # of a data set that may change
            loader.follow_length()
        if self._generator_state is not None:  # each pass draws its workers' seeds from it
            loader.generator.set_state(self._generator_state)
        owners: list[Any] = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None), loader]
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(number)
                break
        return loader


def batch_norms(model: nn.Module) -> list[Any]:
    """Return the batch norms that are in training mode and track statistics."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [norm for norm in norms if norm.training and norm.track_running_stats]


class _Norms(nn.Module):
    """What fvcore sees of a model: the batch norms to recompute, and a function that runs the model on a batch."""

    def __init__(self, norms: list[Any], forward: Callable[[Any], object]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.forward = forward


@torch.no_grad()
def precise_statistics(trainer: TrainerProtocol, model: nn.Module, batches: Iterator[object], count: int) -> None:
    """Estimate the statistics of the training data, over all ranks, with fvcore's ``update_bn_stats``.

    Buffers stay the same tensors, and ``num_batches_tracked`` stays. An error ends the run.

    Args:
        trainer: runs the model.
        model: its batch norms in training mode are set.
        batches, count: batches of training data, and their number.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing fvcore.nn warns about torch.jit
        from fvcore.nn.precise_bn import update_bn_stats
    norms = batch_norms(model)
    is_trainers = unwrap_model(trainer.model) is unwrap_model(model)
    forward = getattr(trainer, "forward", model) if is_trainers else model
    before = [(dict(norm._buffers), norm.num_batches_tracked.clone()) for norm in norms]
    with EventStorage(trainer.iter):  # discards what the model logs
        update_bn_stats(_Norms(norms, forward), batches, count)
    for norm, (buffers, steps) in zip(norms, before, strict=True):
        for key in ("running_mean", "running_var"):
            norm._buffers[key] = buffers[key].copy_(norm._buffers[key])
        norm.num_batches_tracked.copy_(steps)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
        for norm in norms:
            mean = norm.running_mean / ranks
            torch.distributed.all_reduce(mean)
            variance = (norm.running_var + (norm.running_mean - mean).square()) / ranks
            torch.distributed.all_reduce(variance)
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)
