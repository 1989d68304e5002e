"""A step of training: read a batch, compute losses and gradients, update the weights."""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn

from ..hooks.common.optimizers import optimizers_of, refuse_closure
from . import comm
from .data.epoch_iterator import EpochIterator
from .data.microbatch import split_batch
from .data.transfer import move_to_device
from .model_trainer import ModelTrainer
from .modeling.adapters import ModelAdapter
from .modeling.explain import raise_clearer
from .parallel.base import Strategy, check_strategy, own_method, strategy_of
from .ranks.loss_weights import LossWeights
from .solver.clipping import clipper_of
from .solver.several import OptimizerList, one_or_several
from .step.choice import whole_step
from .step.fast_path import FastOptimizer, backward
from .step.grad_scaler import scaled_step, unscale
from .step.nonfinite import NonFinitePolicy

__all__ = ["SimpleTrainer"]


class SimpleTrainer(ModelTrainer):
    """The usual training step: one batch, its losses, one update of the weights.

    :meth:`run_step` calls a method for each part of a step, and each can be overridden. For another kind of step,
    subclass :class:`~hookline.engine.TrainerBase` and write ``run_step``. Epochs, metrics, prediction and state are in
    the base class.

    Args:
        model: called with a batch, returns a dict of losses or one loss (but see ``adapter``). It is set to train mode.
        data_loader: an iterable of batches. When it ends, an epoch ends, and it is started again.
        optimizer: an optimizer, or a list or dict of optimizers. They are stepped together, or take turns if
            ``forward`` has a parameter ``optimizer``; see :class:`~hookline.engine.step.turns.Turns`.
        gather_metric_period: put the losses into the storage every so many iterations.
        zero_grad_before_forward: clear gradients before the forward pass, so that ``after_step`` can read them.
        async_write_metrics: ignored; metrics never wait for the device. detectron2 has this argument.
        adapter: calls the model and finds its losses; see :class:`~hookline.engine.modeling.ModelAdapter`.
        accumulation_steps: number of micro-batches that each batch is split into, for one update.
        clip_gradients: called with the parameters before each update. If it returns their norm, the norm is logged. By
            default the clipper of an optimizer from ``build_optimizer``, whose ``step`` then does not clip again.
        precision: a dtype for torch.autocast, or None for full precision.
        grad_scaler: for float16; by default one is created if ``precision`` is float16.
        device: where batches are moved; None leaves them where they are.
        iters_per_epoch: batches per epoch, for loaders without a length or an end.
        nonfinite: what to do if a loss or gradient is NaN or infinite: "raise" a FloatingPointError, "skip" the update,
            or "stop" training without the update. On a GPU steps do not wait for the check; see
            :class:`~hookline.engine.step.nonfinite.NonFinitePolicy`.
        nonfinite_limit: this many iterations in a row without an update are an error.
        compile_step: run forward, backward and update as one graph made by ``torch.compile``; a dict has its arguments.
        cuda_graph: capture forward, backward and update in a CUDA graph.
        strategy: how several processes train the model, which it has wrapped. By default DDP for a model in
            DistributedDataParallel.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]",
        gather_metric_period: int = 1,
        zero_grad_before_forward: bool = False,
        async_write_metrics: bool = False,
        *,
        adapter: ModelAdapter | None = None,
        accumulation_steps: int = 1,
        clip_gradients: Callable[[list[nn.Parameter]], torch.Tensor | None] | None = None,
        precision: torch.dtype | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        device: torch.device | str | None = None,
        iters_per_epoch: int | None = None,
        nonfinite: Literal["raise", "skip", "stop"] = "raise",
        nonfinite_limit: int = 100,
        compile_step: bool | Mapping[str, Any] = False,
        cuda_graph: bool = False,
        strategy: Strategy | None = None,
    ) -> None:
        super().__init__()
        model.train()
        self.model = model
        self.data_loader = data_loader
        self.optimizer: Any = one_or_several(optimizer, OptimizerList)
        if type(self).run_step is SimpleTrainer.run_step and type(self).optimizer_step is SimpleTrainer.optimizer_step:
            for one in optimizers_of(self.optimizer):
                refuse_closure(type(one))
        self.gather_metric_period = gather_metric_period
        self.zero_grad_before_forward = zero_grad_before_forward
        self.async_write_metrics = async_write_metrics
        self.adapter = adapter or ModelAdapter()
        self.accumulation_steps = accumulation_steps
        self.clip_gradients = clip_gradients or clipper_of(self.optimizer)
        self.precision = precision
        self.device = torch.device(device) if device is not None else None
        if grad_scaler is None and precision is torch.float16:
            grad_scaler = torch.amp.GradScaler(self._device_type())
        self.grad_scaler = grad_scaler
        self._given_length = iters_per_epoch
        self._batches = EpochIterator(data_loader, iters_per_epoch, weakref.proxy(self), self.device)
        self.nonfinite = NonFinitePolicy(nonfinite, nonfinite_limit)
        self.strategy = strategy or strategy_of(model)
        check_strategy(self.strategy, model, data_loader)
        self._backward = own_method(self.strategy, "backward") or backward
        self._fast = FastOptimizer(self.optimizer, own_method(self.strategy, "step"))
        self._whole_step = whole_step(compile_step, cuda_graph, self)
        self._averaging_ranks = comm.get_world_size() if self.strategy.averages else 1

    # ------------------------------------------------------------------ the step

    def run_step(self) -> None:
        """Read a batch, compute its losses and gradients, and update the weights.

        Losses and gradients are checked before the update, which is not made if one of them is NaN or infinite.
        :meth:`_write_metrics` puts the losses, their sum and the time of :meth:`fetch` into the storage.
        """
        start = time.perf_counter()
        batch = self.fetch()
        data_time = time.perf_counter() - start
        if self._whole_step is None or not self._whole_step.run(self, batch, data_time):
            self._run_parts(batch, data_time)

    def _run_parts(self, batch: Any, data_time: float) -> None:
        if self.zero_grad_before_forward:
            self.zero_grad()
        self.nonfinite.begin(self)
        if self.accumulation_steps > 1 or self._averaging_ranks > 1:
            loss_dict = self.accumulate(batch)
        else:
            loss_dict = self.forward_backward(batch)
        self._write_metrics(loss_dict, data_time)
        self.optimizer_step()
        if not self.zero_grad_before_forward:
            self.zero_grad()

    def fetch(self) -> Any:
        """Read the next batch and move it to the device."""
        listeners = self._listeners
        if listeners["before_fetch"]:
            self._dispatch("before_fetch")
        batch = next(self._batches)
        if self.device is not None and self.device.type != "cpu":  # loaders read into the host's memory
            batch = move_to_device(batch, self.device)
        if listeners["after_fetch"]:
            self._dispatch("after_fetch", batch)
        return batch

    def accumulate(self, batch: Any) -> dict[str, torch.Tensor]:
        """Compute losses and gradients of a batch that is split into micro-batches, or shared by several ranks.

        Each micro-batch goes through :meth:`forward_backward`, and gradients add up. The update follows in
        :meth:`run_step`, after the last micro-batch.
        """
        parts = [(batch, 1.0)]  # each with its share of the samples
        if self.accumulation_steps > 1:
            # FSDP2 gathers parameters in each pass, so all ranks need the same number of passes.
            parts = list(split_batch(batch, self.accumulation_steps, exact=self._averaging_ranks > 1))
        weights = LossWeights(self._batches, batch, self._averaging_ranks)
        total: dict[str, torch.Tensor] = {}
        for index, (micro_batch, share) in enumerate(parts):
            # Ranks exchange gradients once per step, in the last backward pass.
            with self.strategy.no_sync(self.model) if index < len(parts) - 1 else nullcontext():
                losses = self.forward_backward(micro_batch, weights, share)
            for name, loss in losses.items():
                total[name] = total[name] + loss.detach() if name in total else loss.detach()
        total, num_items = weights.finish(total, self.optimizer.param_groups, several=len(parts) > 1)
        if num_items is not None:
            self.storage.put_scalar("num_items", num_items, smoothing_hint=False)
        return total

    def forward_backward(
        self, batch: Any, weights: LossWeights | None = None, share: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Compute the losses of a batch or micro-batch, and add their gradients to the parameters'.

        Args:
            batch: the batch or micro-batch.
            weights: weights the losses; None if the whole step is this batch on this rank.
            share: the micro-batch's part of this rank's samples.

        Returns:
            The weighted losses by name.
        """
        listeners = self._listeners
        if listeners["before_forward"]:
            self._dispatch("before_forward", batch)
        loss_dict = self.forward(batch)
        if listeners["after_forward"]:
            self._dispatch("after_forward", batch, loss_dict)
        if weights is not None:
            loss_dict = weights.apply(loss_dict, share)
        elif "num_items" in loss_dict:
            self.storage.put_scalar("num_items", loss_dict.pop("num_items"), smoothing_hint=False)
        first, *others = loss_dict.values()
        losses = sum(others, start=first)
        if listeners["before_backward"]:
            self._dispatch("before_backward", losses)
        self.backward(losses)
        self.after_backward()
        return loss_dict

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        """Return the losses of a batch by name, and ``num_items`` if the model or loss counts its items."""
        try:
            if self.precision is None:
                return self.adapter.losses(self.model, batch)
            with self._autocast():
                return self.adapter.losses(self.model, batch)
        except Exception as error:
            raise_clearer(error, batch, self.strategy.explain(error, self.model))
            raise

    def backward(self, losses: torch.Tensor) -> None:
        """Add the gradients of ``losses`` to the parameters'."""
        if self.grad_scaler is not None:
            losses = self.grad_scaler.scale(losses)
        try:
            self._backward(losses)
        except RuntimeError as error:
            raise_clearer(error)
            raise

    def optimizer_step(self) -> None:
        """Clip the gradients, and update the weights, unless the step must be skipped."""
        if self.nonfinite.skip_update:
            self.nonfinite.skip_update = False
            return
        listeners, scaler, fast = self._listeners, self.grad_scaler, self._fast_optimizer()
        if scaler is not None and (self.clip_gradients is not None or listeners["before_optimizer_step"]):
            unscale(scaler, self.optimizer)
        if self.clip_gradients is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            norm = self.strategy.clip(self.clip_gradients, parameters)
            if norm is not None:
                self.storage.put_scalar("grad_norm", norm)
            fast.pause_clipping(True)
        if listeners["before_optimizer_step"]:
            self._dispatch("before_optimizer_step")
        if scaler is None:
            fast.step()
        else:
            self.nonfinite.check_scaler(self, scaled_step(scaler, self.optimizer))
            scale = getattr(scaler, "_scale", None)
            if scale is not None:  # get_scale() would wait for the device
                self.storage.put_scalar("grad_scale", scale, smoothing_hint=False)
        if self.clip_gradients is not None:
            fast.pause_clipping(False)
        if listeners["after_optimizer_step"]:
            self._dispatch("after_optimizer_step")

    def zero_grad(self) -> None:
        """Clear the gradients."""
        listeners = self._listeners
        if listeners["before_zero_grad"]:
            self._dispatch("before_zero_grad")
        self._fast_optimizer().zero_grad()
        if listeners["after_zero_grad"]:
            self._dispatch("after_zero_grad")

    def _fast_optimizer(self) -> FastOptimizer:
        if self._fast.optimizer is not self.optimizer:  # the attribute was set
            self._fast = FastOptimizer(self.optimizer, self._fast.own_step)
        return self._fast
