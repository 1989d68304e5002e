"""How much each loss of a step counts: by samples or items, over micro-batches and ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from ...config.errors import MismatchError
from ...hooks.common import in_double, local_part
from .. import comm
from ..data.batches import batch_size_of
from ..data.epoch_iterator import EpochIterator
from ..data.loader import collates
from ..modeling.adapters import ModelAdapter
from ..modeling.outputs import Terms, num_terms
from .protocol import StepTrainer


def forward_backward_weighted(
    trainer: StepTrainer, micro_batches: list[tuple[Any, int | None]]
) -> dict[str, torch.Tensor]:
    """Compute losses and gradients of a batch in micro-batches, or of one that is shared by several ranks.

    Each micro-batch goes through the trainer's ``forward_backward``, and gradients add up.

    Args:
        trainer: the trainer.
        micro_batches: each micro-batch with its number of samples, see :meth:`EpochIterator.micro_batches`.
    """
    ranks, several = trainer.averaging_ranks, trainer.accumulation_steps > 1
    sizes = [batch_size_of(batch, read) for batch, read in micro_batches] if several else [1]
    shares = [size / max(sum(sizes), 1) for size in sizes]
    if ranks > 1:  # FSDP2 gathers parameters in each pass, so all ranks need the same number of passes
        missing = trainer.accumulation_steps - len(micro_batches)
        micro_batches, shares = [*micro_batches, *micro_batches[-1:] * missing], [*shares, *[0.0] * missing]
    batch = micro_batches[0] if not several else (None, sum(sizes))
    weights = LossWeights(trainer.batches, batch, ranks, trainer.adapter)
    total: dict[str, torch.Tensor] = {}
    trainer.adapter.on_count = weights.start_sum
    try:
        for index, ((micro_batch, _), share) in enumerate(zip(micro_batches, shares, strict=True)):
            # Ranks exchange gradients once per step, in the last backward pass.
            with trainer.strategy.no_sync(trainer.model) if index < len(micro_batches) - 1 else nullcontext():
                losses = trainer.forward_backward(micro_batch, weights, share)
            for name, loss in losses.items():
                total[name] = total[name] + loss.detach() if name in total else loss.detach()
    finally:
        trainer.adapter.on_count = None
    total, num_items = weights.finish(total, trainer.optimizer.param_groups, several=len(micro_batches) > 1)
    if trainer.loss_module is not None and ranks > 1:
        trainer.loss_module.average(ranks)
    if num_items is not None:
        trainer.storage.put_scalar("num_items", num_items, smoothing_hint=False)
    return total


class LossWeights:
    """Weights the losses of one step so that its gradient is that of the loss over the global batch.

    A model's losses are means over the samples it receives, or over items (such as tokens) if it returns ``num_items``;
    one of torch over the terms that it counts. A micro-batch on a rank therefore counts by its number of samples, items
    or terms, divided by the mean number per rank. A loss that is a sum is added up. The logged losses are
    weighted too: their mean over ranks is the loss of the global batch.

    Args:
        batches: the iterator that the batch was read from.
        batch: this rank's batch, and its number of samples, if it is known.
        ranks: number of ranks that average gradients.
        adapter: calls the model and the loss.
    """

    def __init__(self, batches: EpochIterator, batch: tuple[Any, int | None], ranks: int, adapter: Any = None) -> None:
        self._batches = batches
        self._batch = batch
        self._ranks = ranks
        self._adapter = adapter
        self._loss = getattr(adapter, "loss", None)
        self._rank_share: float | None = None
        self._counts: list[Any] = []
        self._of_items = False
        self._skipped = 0.0  # the share of micro-batches without losses
        # The number of items that counts as 1: that of the first micro-batch, so that losses and gradients keep their
        # usual size. The number in the whole batch is known only after the last micro-batch; see finish.
        self._unit: Any = None
        self._first_sum: Any = None
        self._started: Callable[[], Any] | None = None

    def start_sum(self, count: torch.Tensor) -> None:
        """Begin to sum the number of terms of the first micro-batch over ranks, while the model computes them."""
        if self._started is None and self._ranks > 1:
            self._started = comm.start_sum(count)

    def counted(
        self, forward: Callable[[Any], dict[str, torch.Tensor]], batch: object, usual: bool
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Return the losses of a micro-batch, and the number of terms that they are the mean of, for :meth:`apply`.

        If ``forward`` is the ``usual`` one, the adapter counts, and in its loss alone if it has one, since
        :class:`Terms` makes each function of torch slower.
        """
        by_adapter = usual and type(self._adapter).losses is ModelAdapter.losses
        with nullcontext() if by_adapter else Terms():
            losses = forward(batch)
        return losses, num_terms(losses, self._loss)

    def apply(self, losses: dict[str, Any], share: float = 1.0, terms: Any = None) -> dict[str, torch.Tensor]:
        """Multiply the losses of a micro-batch by its weight.

        Args:
            losses: the losses; ``num_items`` is removed.
            share: the micro-batch's part of this rank's samples. 0 for a repeated one, which must not count.
            terms: number of terms that the loss is the mean of, or "sum"; None: it is the mean over samples.
        """
        if not losses:
            if self._ranks > 1:
                raise MismatchError(
                    f"train_step() returned None on rank {comm.get_rank()}: ranks exchange gradients in each step, so "
                    "return a loss of 0 that depends on all parameters, such as sum(p.sum() for p in parameters) * 0"
                )
            self._skipped += share
            return {}
        num_items = losses.pop("num_items", None)
        self._of_items |= num_items is not None
        count = terms if num_items is None else num_items
        weight: Any = 0.0
        if share and count == "sum":
            weight = float(min(self._ranks, comm.get_data_size()))  # ranks average
        elif share and count is None:
            if self._rank_share is None:
                self._rank_share = self.of_rank()
            weight = share * self._rank_share
        elif share:
            self._counts.append(count)
            if self._unit is None:
                self._first_sum = self._sum(count) if self._started is None else self._started()
                self._unit = self._per_rank(self._first_sum)
            weight = count / self._unit
        return {name: _weighted(loss, weight) for name, loss in losses.items()}

    def finish(
        self, losses: dict[str, torch.Tensor], param_groups: list[dict[str, Any]], several: bool
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Scale losses and gradients by what is known after the last micro-batch: items, and micro-batches skipped.

        Args:
            losses: the sums of the weighted losses.
            param_groups: the optimizer's groups; the gradients are scaled in place.
            several: whether there was more than one micro-batch; the same on all ranks.

        Returns:
            The losses, and the number of items in the global batch; None if model and loss do not return it.
        """
        total, scale = self._first_sum, None
        if self._counts and several:
            total = self._sum(sum(self._counts))
            scale = self._unit / self._per_rank(total)
        elif 0.0 < self._skipped < 1.0:
            scale = 1.0 / (1.0 - self._skipped)
        if scale is not None:
            parameters = [p for group in param_groups for p in group["params"]]
            gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
            if isinstance(scale, torch.Tensor) and gradients:
                scale = _like(scale, gradients[0])
            torch._foreach_mul_(gradients, scale)
            losses = {name: loss * scale for name, loss in losses.items()}
        if not self._of_items:
            return losses, None
        same_batch = self._ranks // comm.get_data_size() if self._ranks > 1 else 1  # ranks that share a batch
        return losses, total if same_batch == 1 else total / same_batch

    def of_rank(self) -> float:
        """Return this rank's number of samples over the mean number per rank.

        Batches of a :class:`GlobalBatchSampler` have known sizes; for those of streams and of batch samplers of one's
        own the ranks exchange them. Other loaders are assumed to give all ranks the same number.
        """
        if self._ranks == 1:
            return 1.0
        if (share := self._batches.share) is not None:
            return share
        loader = self._batches.loader
        sampler = getattr(loader, "batch_sampler", None)
        if collates(loader) and (isinstance(loader.dataset, IterableDataset) or type(sampler) is not BatchSampler):
            samples = batch_size_of(*self._batch)
            return samples / self._per_rank(self._sum(samples))
        return 1.0

    def _sum(self, count: Any) -> Any:
        return count if self._ranks == 1 else comm.all_reduce_sum(count)

    def _per_rank(self, total: Any) -> Any:
        """Return the mean over ranks of a count whose sum is ``total``; 1 if that is 0, since it is a divisor."""
        if isinstance(total, torch.Tensor):
            mean = in_double(total) / self._ranks  # whatever the default dtype is
            return torch.where(total > 0, mean, torch.ones_like(mean))
        return total / self._ranks if total else 1.0


def _weighted(loss: torch.Tensor, weight: Any) -> torch.Tensor:
    """Return ``loss * weight``, or 0 for a weight of 0: the mean of nothing is NaN."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, loss * _like(weight, loss), 0.0)
    if weight == 1.0:  # ranks with equal shares
        return loss
    return loss * weight if weight else torch.where(torch.isnan(loss), 0.0, loss) * 0.0


def _like(factor: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """Return a scalar in the dtype of the tensor that it multiplies, but at least in float32."""
    return factor.to(torch.promote_types(one.dtype, torch.float32))
