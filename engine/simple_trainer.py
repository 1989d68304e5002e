"""A trainer with a model, data and an optimizer: its step, epochs, metrics, prediction and state."""

import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..config import ConfigError
from ..config.errors import as_config_error
from ..hooks.common import capture_rng, restore_rng, set_optimizer_mode, sized
from . import comm
from .checkpoint.checkpointer import unwrap_model
from .checkpoint.resume_state import START_ANEW, check_complete, data_of_this_rank, rng_of_this_rank, states_of_ranks
from .data.epoch_iterator import EpochIterator, check_indices, set_data_loader
from .data.loader import move_to_device
from .evaluation.evaluator import predictions
from .evaluation.metrics import gather
from .modeling.adapters import ModelAdapter
from .modeling.build import loss_module_of
from .modeling.clear_errors import raise_clearer
from .modeling.loss_module import LossModule
from .modeling.outputs import losses_of
from .parallel.base import Strategy, check_strategy
from .parallel.copies import check_same_weights, share_weights
from .parallel.ddp import DDP
from .solver.clipping import clipper_of
from .solver.multi_optimizer import OptimizerList
from .step.fast_path import FastStep
from .step.loss_weights import LossWeights, forward_backward_weighted
from .step.nonfinite import NonFinitePolicy, detect_anomaly, record_step, write_metrics
from .step.step_outputs import KeptForHooks, StepOutputs
from .train_loop import Request, TrainerBase

_CPU = torch.device("cpu")


class SimpleTrainer(TrainerBase):
    """The usual training step: one batch, its losses, one update of the weights.

    :meth:`run_step` calls a method for each part of a step, and each can be overridden. For another kind of step,
    subclass :class:`~hookline.engine.TrainerBase` and write ``run_step``.

    Args:
        model: called with a batch, returns a dict of losses or one loss (but see ``adapter``).
        data_loader: an iterable of batches. When it ends, an epoch ends, and it is started again.
        optimizer: an optimizer, or a list or dict of them. They are stepped together, or take turns if ``forward``
            has a parameter ``optimizer``; see :class:`~hookline.engine.step.alternating.AlternatingStep`.
        gather_metric_period: put the losses into the storage every so many iterations.
        zero_grad_before_forward: clear gradients before the forward pass, so that ``after_step`` can read them.
        async_write_metrics: ignored; metrics never wait for the device. detectron2 has this argument.
        adapter: calls the model and finds its losses; see :class:`~hookline.engine.modeling.ModelAdapter`.
        accumulation_steps: number of micro-batches that each batch is split into, for one update.
        clip_gradients: called with the parameters before each update. A norm that it returns is logged. Default: the
            clipper of an optimizer from ``build_optimizer``, whose ``step`` then does not clip again.
        precision: a dtype for torch.autocast, or None for full precision.
        grad_scaler: for float16, for which one is created by default.
        device: where batches are moved; None leaves them where they are.
        iters_per_epoch: batches per epoch, for loaders without a length or an end; or a function of the loader.
        nonfinite, nonfinite_limit: what to do if a loss or gradient is NaN or infinite, and the iterations in a row
            without an update that are an error; see :class:`~hookline.engine.step.nonfinite.NonFinitePolicy`.
        strategy: how several processes train the model, which it has wrapped. Default: DDP for a model in DDP.

    Attributes:
        batch, outputs: the batch or micro-batch of the last forward pass and what the model returned, until the step
            ends. Only if a hook has ``uses_outputs = True``.
        loss_module: the adapter's loss, if it is a module with parameters or buffers. The optimizer must have them.
        sample_indices: the indices of the samples in the step's batch, on this rank.
    """

    loss_module: LossModule | None = None
    batch = KeptForHooks()
    outputs = KeptForHooks()
    strategy: Strategy = None  # type: ignore[assignment]  # until __init__, or add_missing_parts()
    inner_trainer: Any = None  # that a subclass has set as _trainer; its step is run
    async_write_metrics = False
    _step_outputs: StepOutputs | None = None  # if a hook asks for them
    _turns: Any = None  # the AlternatingStep of optimizers that take turns
    _detect_anomaly = detect_anomaly
    _write_metrics = record_step
    write_metrics = staticmethod(write_metrics)
    gather = gather  # the values of all ranks
    predict = predictions  # the model's outputs for each batch of a loader
    data_loader = property(attrgetter("batches.given"), set_data_loader, lambda trainer: trainer.batches.drop_loader())
    _data_loader_iter = property(attrgetter("batches"), set_data_loader)  # detectron2's name
    epoch = property(attrgetter("batches.epoch"))
    iters_per_epoch = property(attrgetter("batches.length"))
    epoch_ended = property(attrgetter("batches.ended"))
    sample_indices = property(attrgetter("batches.indices"))

    def __init__(
        self,
        model: nn.Module = None,  # type: ignore[assignment]
        data_loader: Iterable[Any] = (),
        optimizer: "torch.optim.Optimizer | Sequence[Any] | Mapping[str, Any]" = None,  # type: ignore[assignment]
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
        iters_per_epoch: int | Callable[[Any], int | None] | None = None,
        nonfinite: Literal["raise", "skip", "stop"] = "raise",
        nonfinite_limit: int = 100,
        strategy: Strategy | None = None,
    ) -> None:
        super().__init__()
        if model is optimizer is None:  # a subclass sets them: see add_missing_parts()
            return
        self._pending_rng: dict[str, Any] | None = None  # restored right before the next step
        model.train()
        self.model = model
        if optimizer is None:
            raise ConfigError("the optimizer is None: pass one, or a list or dict of them")
        several: Any = optimizer  # one, or a list or dict of them
        self.optimizer: Any = OptimizerList(several) if isinstance(several, list | tuple | Mapping) else several
        self.gather_metric_period = gather_metric_period
        self.zero_grad_before_forward = zero_grad_before_forward
        self.adapter = adapter or ModelAdapter()
        if loss_module := loss_module_of(getattr(self.adapter, "loss", None), model):
            self.loss_module = loss_module
        self.accumulation_steps = accumulation_steps
        self.clip_gradients = clip_gradients or clipper_of(self.optimizer)
        self.precision = precision
        self.device = torch.device(device) if device is not None else None
        if grad_scaler is None and precision is torch.float16:
            grad_scaler = torch.amp.GradScaler(self.device_type)
        # One that is disabled does nothing.
        self.grad_scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self.batches = EpochIterator(data_loader, iters_per_epoch, weakref.proxy(self))
        self.nonfinite = NonFinitePolicy(nonfinite, nonfinite_limit)
        self.strategy = strategy or (DDP() if isinstance(model, DistributedDataParallel) else Strategy())
        check_strategy(self.strategy, model, data_loader, self.grad_scaler)
        if self.loss_module is not None and self.strategy.same_state_on_all_ranks:
            share_weights(self.loss_module.module)
        self._fast = FastStep(self.strategy)
        has_several = isinstance(self.optimizer, OptimizerList)
        if has_several and "optimizer" in inspect.signature(unwrap_model(model).forward).parameters:
            from .step.alternating import AlternatingStep  # only where it is used

            self._turns = AlternatingStep()

    def add_missing_parts(self) -> None:
        """Do the work of ``__init__`` for a subclass that sets its parts itself. What it has set stays."""
        given = dict(vars(self))
        data_loader = self.data_loader if "batches" in given else iter(())
        SimpleTrainer.__init__(self, given.get("model", nn.Identity()), data_loader, given.get("optimizer", ()))
        vars(self).update(given)

    # ------------------------------------------------------------------ the step

    def run_step(self) -> None:
        """Read a batch, compute its losses and gradients, and update the weights if all of them are finite."""
        if self.inner_trainer is not None:
            return self.inner_trainer.of(self).run_step()
        if not self.model.training:
            raise AssertionError("[SimpleTrainer] model was changed to eval mode! Call model.train() before the step")
        weighted = self.accumulation_steps > 1 or (self.strategy.averages and self.averaging_ranks > 1)
        start = time.perf_counter()
        batch = self.batches.micro_batches(self.accumulation_steps, self.fetch) if weighted else self.fetch()
        data_time = time.perf_counter() - start
        if self._turns is not None:
            return self._turns.run(self, batch, data_time)
        if self.zero_grad_before_forward:
            self.zero_grad()
        loss_dict = forward_backward_weighted(self, batch) if weighted else self.forward_backward(batch)
        if not loss_dict:
            self.storage.put_scalar("data_time", data_time)
            return self.nonfinite.count_skipped(self.iter)
        self.record_losses(loss_dict, data_time)
        self.optimizer_step()
        if not self.zero_grad_before_forward:
            self.zero_grad()

    def fetch(self) -> Any:
        """Read the next batch, or micro-batch, and move it to the device."""
        listeners = self.hooks.listeners
        if listeners["before_fetch"]:
            self.emit("before_fetch")
        batch = next(self.batches)
        if self.device is not None and self.device != _CPU:
            batch = move_to_device(batch, self.device)
        if listeners["after_fetch"]:
            with sized(batch, self.batches.num_samples):
                self.emit("after_fetch", batch)
        return batch

    def forward_backward(
        self, batch: Any, weights: LossWeights | None = None, share: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Compute the losses of a batch or micro-batch, and add their gradients to the parameters'.

        Args:
            batch: the batch or micro-batch.
            weights: weights the losses; None if the whole step is this batch on this rank.
            share: the micro-batch's part of this rank's samples.

        Returns:
            The weighted losses by name; empty if the model skips the batch.
        """
        listeners = self.hooks.listeners
        if listeners["before_forward"]:
            self.emit("before_forward", batch)
        if weights is None:
            loss_dict, terms = self.forward(batch), None
        else:
            loss_dict, terms = weights.counted(self.forward, batch, type(self).forward is SimpleTrainer.forward)
        if isinstance(loss_dict, torch.Tensor):  # a subclass's forward() may return one loss
            loss_dict = losses_of(loss_dict)
        if not loss_dict:
            return {} if weights is None else weights.apply({}, share)
        if listeners["after_forward"]:
            self.emit("after_forward", batch, loss_dict)
        if weights is not None:
            loss_dict = weights.apply(loss_dict, share, terms)
        elif "num_items" in loss_dict:
            self.storage.put_scalar("num_items", loss_dict.pop("num_items"), smoothing_hint=False)
        first, *others = loss_dict.values()
        losses = sum(others, start=first)
        if listeners["before_backward"]:
            self.emit("before_backward", losses)
        self.backward(losses)
        self.after_backward()
        return loss_dict

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        """Return a batch's losses by name, and ``num_items`` if items are counted; a subclass may return one loss."""
        try:
            if self.precision is None:
                return self.adapter.losses(self.model, batch)
            with torch.autocast(self.device_type, dtype=self.precision):
                return self.adapter.losses(self.model, batch)
        except Exception as error:
            raise_clearer(error, batch)
            raise

    def backward(self, losses: torch.Tensor) -> None:
        """Add the gradients of ``losses`` to the parameters'."""
        if self.grad_scaler is not None:
            losses = self.grad_scaler.scale(losses)
        try:
            self._fast.backward(losses)
        except RuntimeError as error:
            raise_clearer(error)
            raise

    def optimizer_step(self) -> None:
        """Clip the gradients, and update the weights, unless the step must be skipped."""
        if self.nonfinite.skip_update:
            self.nonfinite.skip_update = False
            return
        listeners, scaler, optimizer = self.hooks.listeners, self.grad_scaler, self.optimizer
        if scaler is not None and (self.clip_gradients is not None or listeners["before_optimizer_step"]):
            scaler.unscale_(optimizer)
        if self.clip_gradients is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            norm = self.strategy.clip(self.clip_gradients, parameters)
            if norm is not None:
                self.storage.put_scalar("grad_norm", norm)
            self._fast.pause_clipping(optimizer, True)
        if listeners["before_optimizer_step"]:
            self.emit("before_optimizer_step")
        if scaler is None:
            self._fast.step(optimizer)
        else:
            self.nonfinite.scaled_step(self)
        if self.clip_gradients is not None:
            self._fast.pause_clipping(optimizer, False)
        if listeners["after_optimizer_step"]:
            self.emit("after_optimizer_step")

    def zero_grad(self) -> None:
        """Clear the gradients."""
        listeners = self.hooks.listeners
        if listeners["before_zero_grad"]:
            self.emit("before_zero_grad")
        self._fast.zero_grad(self.optimizer)
        if listeners["after_zero_grad"]:
            self.emit("after_zero_grad")

    def record_losses(self, loss_dict: Mapping[str, torch.Tensor], data_time: float, prefix: str = "") -> None:
        """Check a step's losses and gradients before the update, and put its metrics.

        Calls ``_detect_anomaly(losses, loss_dict)`` of a subclass, and ``_write_metrics``.
        """
        if type(self)._detect_anomaly is not detect_anomaly:
            first, *others = loss_dict.values()
            self._detect_anomaly(sum(others, start=first), dict(loss_dict))
        if prefix:
            self._write_metrics(loss_dict, data_time, prefix)
        else:  # one of a subclass may have no prefix
            self._write_metrics(loss_dict, data_time)

    # ------------------------------------------------------------------ epochs, data and devices

    def reset_data_loader(self, data_loader_builder: Callable[[], Iterable[Any]]) -> None:
        """Replace the data loader, from the next step on.

        The count of epochs continues. If batches of the present epoch were read, the epoch ends with the present step.
        A position that a resume has loaded, and whose next batch was not read yet, is loaded into the new loader.
        ``data_loader_builder`` is called after the old loader and its workers are deleted.
        """
        self.batches.drop_loader()
        self.data_loader = data_loader_builder()

    def skip_epoch(self) -> None:
        """End the epoch with the present step; the next step starts from the beginning of the data."""
        self.batches.skip_epoch()

    def _begin_epoch(self) -> None:
        if self.batches.ended and self.batches.loaded is None:
            self.batches.next_epoch()
        self.before_epoch()
        self.batches.begin_epoch()  # of another loader, if a hook has replaced it
        if self._pending_rng is not None:
            self.batches.prepare(self.accumulation_steps)  # an epoch's iterator existed before the state was saved
            restore_rng(self._pending_rng)
            self._pending_rng = None

    @property
    def averaging_ranks(self) -> int:
        """The number of ranks whose gradients are averaged."""
        return comm.get_world_size() if self.strategy.averages else 1

    def to_device(self, batch: Any) -> Any:
        """Move a batch that is not read by a step to the model's device."""
        return batch if self.device is None else move_to_device(batch, self.device)

    @property
    def device_type(self) -> str:
        """The type of the device that the model computes on, such as "cuda"."""
        if self.device is not None:
            return self.device.type
        parameter = next(self.model.parameters(), None)
        return "cpu" if parameter is None else parameter.device.type

    def print(self, *values: Any, **options: Any) -> None:
        """Call ``print`` on rank 0 only."""
        if comm.is_main_process():
            print(*values, **options)

    @torch.no_grad()
    def eval_losses(self, batch: Any, outputs: Any) -> dict[str, Any]:
        """Return the losses of a batch of an evaluation, with the arguments that ``after_eval_step`` receives.

        A model that computes its own losses and returned none in eval mode is called a second time.
        """
        return self.adapter.losses_of_predictions(unwrap_model(self.model), batch, outputs)

    # ------------------------------------------------------------------ checks and state

    def hooks_changed(self) -> None:
        if self.strategy is None:
            if not {"model", "optimizer"} <= vars(self).keys():  # nothing to watch yet
                return
            self.add_missing_parts()
        asked = any(hook.uses_outputs for hook in self.hooks.hooks)
        if asked or self._step_outputs is not None:
            self._step_outputs = self._step_outputs or StepOutputs(self)
            self._step_outputs.bind(asked)
        check_indices(self)

    def move_modules(self) -> None:
        """Move modules that are attributes of the trainer, such as a metric or a second model, to its device."""
        loss = getattr(self.adapter, "loss", None)
        for value in [*vars(self).values(), loss, getattr(self.loss_module, "module", None)]:
            if isinstance(value, nn.Module) and value is not self.model and self.device is not None:
                value.to(self.device)

    def _begin(self) -> None:
        if self.strategy is None:
            self.add_missing_parts()
        self.move_modules()
        if self.loss_module is not None:
            self.loss_module.check_optimized(self.optimizer)
        if self._error is not None:  # an earlier run failed, perhaps between backward pass and update
            self.optimizer.zero_grad()
        if not (self.model.training and unwrap_model(self.model).training):  # else submodules may be in eval mode
            self.model.train()
        set_optimizer_mode(self.optimizer, training=True)
        super()._begin()

    def after_train(self) -> None:
        if self.hooks.running:
            set_optimizer_mode(self.optimizer, training=False)
            if self._pending_rng is not None and not self.failed:
                # A resumed run without a step: an evaluation at its end must draw the numbers of the killed run's.
                restore_rng(self._pending_rng)
                self._pending_rng = None
        super().after_train()

    def prepare_for(self, what: Request) -> None:
        if self._loop.prepared.get(what) == self.iter:
            return
        self.nonfinite.raise_pending(self)
        if what != "write":
            self.nonfinite.check_weights(self, self.ranks_in_sync)
            # At the end, all ranks are here, whatever hooks they have.
            if self._loop.sync is not None and (self.ranks_in_sync or self.ending):
                check_same_weights(self.strategy, self.model, self.finished_iter)
        super().prepare_for(what)
        if what == "save" and self.ranks_in_sync:
            self.strategy.before_save(self.model, self.optimizer)
            self._loop.of_ranks = self.finished_iter, states_of_ranks(self.batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint. Raises a FloatingPointError if a weight is NaN or infinite."""
        if not self.hooks.running or self._loop.prepared.get("save") != self.iter:  # not of a PeriodicCheckpointer
            self.nonfinite.raise_pending(self)
            self.nonfinite.check_weights(self)
        state = super().state_dict()
        state |= {"nonfinite": self.nonfinite.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        if self.loss_module is not None:
            state["loss"] = self.loss_module.state_dict()
        state["data"] = self.batches.state_dict()
        state["rng"] = capture_rng(of_training=True)
        iteration, of_ranks = self._loop.of_ranks
        if iteration == self.finished_iter:
            state |= of_ranks
        if comm.get_world_size() > 1 and not self.strategy.same_state_on_all_ranks:
            state["same_state_on_all_ranks"] = False
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Raises a ConfigError if it is the state of another trainer."""
        if self.hooks.running:
            return super().load_state_dict(state_dict)
        check_complete(state_dict)
        super().load_state_dict(state_dict)
        with as_config_error(f"the checkpoint's optimizer (of another model or parameter groups? {START_ANEW})"):
            self.optimizer.load_state_dict(state_dict["optimizer"])
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        if self.loss_module is not None:
            self.loss_module.load_state_dict(state_dict.get("loss"))
        if "data" in state_dict:
            self.batches.load_state_dict(data_of_this_rank(state_dict, self.batches))
        self._pending_rng = rng_of_this_rank(state_dict)
        self.nonfinite.load_state_dict(state_dict.get("nonfinite", {}))
