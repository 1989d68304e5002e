"""The loop: :class:`TrainerBase` runs hooks around steps, :class:`SimpleTrainer` knows what a step is."""

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..hooks.base import STEP_EVENTS, StopTraining
from ..hooks.events import EventStorage, get_event_storage
from ..hooks.host import HookHost, hook_name
from . import comm
from .data.epoch_iterator import EpochIterator
from .data.microbatch import split_batch
from .data.transfer import move_to_device
from .evaluation.evaluator import inference_context
from .modeling.adapters import ModelAdapter
from .state import capture_rng, restore_rng

__all__ = ["AMPTrainer", "SimpleTrainer", "TrainResult", "TrainerBase"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        reason: why it ended: "completed", or what was given to ``request_stop``.
        iteration: how many iterations are done, those before a resume included.
        metrics: the last value of every metric.
    """

    reason: str
    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)


class TrainerBase(HookHost):
    """Runs ``run_step`` again and again, and the hooks around it; knows nothing of models or data.

    A subclass defines :meth:`run_step`; see :class:`~hookline.hooks.HookBase` for the order of events.

    Attributes:
        iter: the present iteration, from ``start_iter`` to ``max_iter - 1``, and ``max_iter`` once all are done.
        start_iter, max_iter: where this run starts and ends. Changing ``max_iter`` while training is fine.
        epoch: number of passes over the data so far; 0 where there is no notion of it.
        iters_per_epoch: iterations in one pass, or None where that is not known.
        epoch_ended: whether the present step is the last of its epoch.
        storage: the :class:`~hookline.hooks.EventStorage` of the present run.
        comm: the module of rank and collective functions, for hooks.
    """

    epoch: int = 0
    iters_per_epoch: int | None = None
    epoch_ended: bool = False
    comm = comm

    def __init__(self) -> None:
        super().__init__()
        self.iter: int = 0
        self.start_iter: int = 0
        self.max_iter: int = 0
        self.storage: EventStorage
        # The last iteration whose step is done, which is what a checkpoint holds; None before any.
        self._finished: int | None = None
        self._stop_reason: str | None = None
        self._error: BaseException | None = None
        self._requests: set[str] = set()

    # ------------------------------------------------------------------ the loop

    def train(self, start_iter: int, max_iter: int) -> TrainResult:
        """Run iterations ``start_iter`` to ``max_iter - 1``. May be called again afterwards.

        Args:
            start_iter: the first iteration.
            max_iter: one beyond the last.

        Returns:
            How the run ended.

        Raises:
            Exception: whatever a step or a hook raises, after every hook's ``after_train``.
        """
        logger.info("Starting training from iteration %d", start_iter)
        self.iter = self.start_iter = start_iter
        self.max_iter = max_iter
        self._finished = start_iter - 1
        self._stop_reason = self._error = None
        self._requests.clear()
        self._start_hooks()
        logger.debug("Hooks, in the order they are called in:\n%s", self.describe_hooks())
        with EventStorage(start_iter) as self.storage:
            try:
                self.before_train()
                while self.iter < self.max_iter and self._stop_reason is None:
                    self.before_step()
                    self.run_step()
                    self.after_step()
                    self.iter += 1
            except StopTraining as stop:  # raised by a step; those of hooks are requests already
                self.request_stop(str(stop))
            except BaseException as error:
                self._error = error
                self._report(error)
                raise
            finally:
                self.after_train()
            metrics = {name: value for name, (value, _) in self.storage.latest().items()}
        reason = self._stop_reason or "completed"
        logger.info("Training ended at iteration %d: %s", self.iter, reason)
        return TrainResult(reason, self.iter, metrics)

    def request_stop(self, reason: str = "") -> None:
        """Ask that training end, in good order, with the present step. The first reason given counts."""
        if self._stop_reason is None:
            self._stop_reason = reason or "stop requested"

    def request_save(self) -> None:
        """Ask for a checkpoint at the end of the present step."""
        self._requests.add("on_save")

    def request_write(self) -> None:
        """Ask that metrics be written at the end of the present step."""
        self._requests.add("on_write")

    def request_eval(self) -> None:
        """Ask for an evaluation at the end of the present step."""
        self._requests.add("on_eval")

    @property
    def finished_iter(self) -> int:
        """The last iteration whose step is done: what a checkpoint holds, and one before what a resume starts with."""
        return self.iter if self._finished is None else self._finished

    @property
    def completed(self) -> bool:
        """Whether every iteration up to ``max_iter`` is done and nothing went wrong."""
        return self._error is None and self.iter >= self.max_iter

    @property
    def failed(self) -> bool:
        """Whether the run is ending with an exception."""
        return self._error is not None

    def before_train(self) -> None:
        self._dispatch("before_train")

    def before_epoch(self) -> None:
        self._dispatch("before_epoch")

    def before_step(self) -> None:
        # For the whole of a step, storage.iter == trainer.iter.
        self.storage.iter = self.iter
        if self._joined or self._left:
            self._change_hooks()
        self._dispatch("before_step")

    def run_step(self) -> None:
        """One iteration: defined by a subclass."""
        raise NotImplementedError(f"{type(self).__name__} must define run_step()")

    def after_backward(self) -> None:
        self._dispatch("after_backward")

    def after_step(self) -> None:
        self._finished = self.iter
        if self.iter == self.start_iter:
            self._warn_of_silent_events()
        self._dispatch("after_step")
        if self.epoch_ended:
            self.after_epoch()
        if self._requests:
            self._serve_requests()

    def after_epoch(self) -> None:
        self._dispatch("after_epoch")

    def after_train(self) -> None:
        """Give every hook its ``after_train``, whatever the others raise; the first error of the run wins."""
        if self._error is None and self._finished is not None:
            # Every step that began is done: put what comes now (a last evaluation) after the last of them.
            self.iter = self.storage.iter = self._finished + 1
        first: BaseException | None = None
        for event in ("after_train", "on_write", "on_save"):
            if event == "on_save" and event not in self._requests:
                continue
            for one in self._listeners[event]:
                try:
                    self._run((one,), event, (), {})
                except BaseException as error:
                    first = first or error
                    self._add_error(error, first)
        self._requests.clear()
        self._running = False
        if first is not None and self._error is None:
            self._error = first
            raise first

    def _serve_requests(self) -> None:
        """At the end of a step, when all hooks had their say: evaluate, then write, then save all of it."""
        for event in ("on_eval", "on_write", "on_save"):
            if event in self._requests:
                self._requests.discard(event)
                self._dispatch(event)

    def _warn_of_silent_events(self) -> None:
        """Tell of hooks that wait for events which this trainer's step does not emit."""
        for event in STEP_EVENTS:
            silent = [call for call, cost in self._listeners[event] if not cost[1]]
            if silent:
                logger.warning(
                    "%s waits for the event %s, which %s.run_step() did not emit: it will not be called. "
                    "Call self.emit(%r) there, or the method of SimpleTrainer that does",
                    ", ".join(hook_name(getattr(call, "__self__", None)) for call in silent),
                    event,
                    type(self).__name__,
                    event,
                )

    def _report(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            logger.error("Exception during training, at iteration %d", self.iter, exc_info=error)
        else:
            logger.warning("Training is ended by %s, at iteration %d", type(error).__name__, self.iter)
        for one in self._listeners["on_exception"]:
            try:
                self._run((one,), "on_exception", (error,), {})
            except BaseException as other:
                self._add_error(other, error)

    def _add_error(self, error: BaseException, first: BaseException) -> None:
        """Keep a later error from hiding the first one: log it, and note it there."""
        first = self._error or first
        if error is not first:
            logger.error("Another exception, after the one that ended training", exc_info=error)
            first.add_note(f"then also: {type(error).__name__}: {error}")

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the trainer: the last finished iteration, and the state of each hook."""
        state: dict[str, Any] = {"iteration": self.finished_iter}
        hooks = self._hooks_state()
        if hooks:
            state["hooks"] = hooks
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; :attr:`iter` becomes the last finished iteration, so go on at ``iter + 1``."""
        self.iter, self._finished = state_dict["iteration"], None
        self._load_hooks_state(state_dict.get("hooks", {}))


class SimpleTrainer(TrainerBase):
    """The usual step: one batch, one loss, one update.

    Each part of :meth:`run_step` is a method a subclass may replace. For anything that does not fit, subclass
    :class:`TrainerBase` and write ``run_step``, or write a loop of your own: the hooks' classes, the storage and
    the writers work there as well.

    Args:
        model: given a batch, returns a dict of losses or one loss (or see ``adapter``). It is set to training mode.
        data_loader: an iterable of batches. When it ends it is started over: that is an epoch.
        optimizer: updates the model's parameters.
        gather_metric_period: put the losses into the storage every so many iterations.
        zero_grad_before_forward: clear gradients before the forward pass instead of after the update; then
            they can still be read in ``after_step``.
        async_write_metrics: accepted for detectron2's sake: metrics never wait for the device here.
        adapter: how the model is called and its losses are found, where that is not the above.
        accumulation_steps: micro-batches each batch is cut in; the gradient is that of the whole batch.
        clip_gradients: called with the parameters before each update; may return their norm, which is logged.
        precision: a dtype for torch.autocast, or None for full precision.
        grad_scaler: for float16; one is made if ``precision`` is float16.
        device: where batches are moved; None leaves them where they are.
        iters_per_epoch: batches an epoch, for loaders that have no length or never end.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
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
    ) -> None:
        super().__init__()
        # Dropout and batch norm behave otherwise in evaluation; whoever wants that calls model.eval() afterwards.
        model.train()
        self.model = model
        self.data_loader = data_loader
        self.optimizer = optimizer
        self.gather_metric_period = gather_metric_period
        self.zero_grad_before_forward = zero_grad_before_forward
        self.async_write_metrics = async_write_metrics
        self.adapter = adapter or ModelAdapter()
        self.accumulation_steps = accumulation_steps
        self.clip_gradients = clip_gradients
        self.precision = precision
        self.device = torch.device(device) if device is not None else None
        if grad_scaler is None and precision is torch.float16:
            grad_scaler = torch.amp.GradScaler(self._device_type())
        self.grad_scaler = grad_scaler
        self._batches = EpochIterator(data_loader, iters_per_epoch, weakref.proxy(self))
        self._rng: dict[str, Any] | None = None

    # ------------------------------------------------------------------ data

    @property
    def _data_loader_iter(self) -> EpochIterator:
        return self._batches

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self._batches.epoch

    @property
    def iters_per_epoch(self) -> int | None:  # type: ignore[override]
        return self._batches.length

    @property
    def epoch_ended(self) -> bool:  # type: ignore[override]
        return self._batches.ended

    def reset_data_loader(self, data_loader_builder: Callable[[], Iterable[Any]]) -> None:
        """Go on with another loader, made by ``data_loader_builder()`` once the old one has been let go."""
        del self.data_loader, self._batches
        self.data_loader = data_loader_builder()
        self._batches = EpochIterator(self.data_loader, None, weakref.proxy(self))

    def before_step(self) -> None:
        self.storage.iter = self.iter
        batches = self._batches
        if batches.ended:
            batches.next_epoch()
        if self._joined or self._left:
            self._change_hooks()
        if batches.position == 0 or self.iter == self.start_iter:
            self.before_epoch()
        if self._rng is not None:
            self._restore_rng()
        self._dispatch("before_step")

    def skip_epoch(self) -> None:
        """Ask that the epoch end with the present step; the next one begins with the data's start."""
        self._batches.skip_epoch()

    # ------------------------------------------------------------------ the step

    def run_step(self) -> None:
        """Fetch a batch, compute its losses and gradients, update the weights."""
        start = time.perf_counter()
        batch = self.fetch()
        data_time = time.perf_counter() - start
        if self.zero_grad_before_forward:
            self.zero_grad()
        loss_dict = self.accumulate(batch) if self.accumulation_steps > 1 else self.forward_backward(batch)
        self._write_metrics(loss_dict, data_time)
        self.optimizer_step()
        if not self.zero_grad_before_forward:
            self.zero_grad()

    def fetch(self) -> Any:
        """Read the next batch and bring it to the device."""
        listeners = self._listeners
        if listeners["before_fetch"]:
            self._dispatch("before_fetch")
        batch = next(self._batches)
        if self.device is not None:
            batch = move_to_device(batch, self.device)
        if listeners["after_fetch"]:
            self._dispatch("after_fetch", batch)
        return batch

    def forward_backward(self, batch: Any, weight: float = 1.0) -> dict[str, torch.Tensor]:
        """Losses and gradients of one (micro-)batch.

        Args:
            batch: as the loader gave it, or a part of it.
            weight: its share of the whole batch.

        Returns:
            The losses by name, each times ``weight``.
        """
        listeners = self._listeners
        if listeners["before_forward"]:
            self._dispatch("before_forward", batch)
        loss_dict = self.forward(batch)
        if listeners["after_forward"]:
            self._dispatch("after_forward", batch, loss_dict)
        if weight != 1.0:
            loss_dict = {name: loss * weight for name, loss in loss_dict.items()}
        first, *others = loss_dict.values()
        losses = sum(others, start=first)
        if listeners["before_backward"]:
            self._dispatch("before_backward", losses)
        self.backward(losses)
        self.after_backward()
        return loss_dict

    def accumulate(self, batch: Any) -> dict[str, torch.Tensor]:
        """Losses and gradients of a batch, one micro-batch at a time, weighted by their shares of its samples."""
        total: dict[str, torch.Tensor] = {}
        for micro_batch, weight in split_batch(batch, self.accumulation_steps):
            for name, loss in self.forward_backward(micro_batch, weight).items():
                loss = loss.detach()
                total[name] = total[name] + loss if name in total else loss
        return total

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        """The losses of a batch, by name."""
        with self._autocast():
            return self.adapter.losses(self.model, batch)

    def backward(self, losses: torch.Tensor) -> None:
        """Add the gradients of ``losses`` to the parameters'."""
        if self.grad_scaler is not None:
            losses = self.grad_scaler.scale(losses)
        losses.backward()

    def optimizer_step(self) -> None:
        """Clip the gradients, and update the weights."""
        listeners, scaler = self._listeners, self.grad_scaler
        if self.clip_gradients is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            norm = self.clip_gradients([p for group in self.optimizer.param_groups for p in group["params"]])
            if norm is not None:
                self.storage.put_scalar("grad_norm", norm)
        if listeners["before_optimizer_step"]:
            self._dispatch("before_optimizer_step")
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        if listeners["after_optimizer_step"]:
            self._dispatch("after_optimizer_step")

    def zero_grad(self) -> None:
        """Clear the gradients."""
        listeners = self._listeners
        if listeners["before_zero_grad"]:
            self._dispatch("before_zero_grad")
        self.optimizer.zero_grad()
        if listeners["after_zero_grad"]:
            self._dispatch("after_zero_grad")

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self._device_type(), dtype=self.precision)

    def _device_type(self) -> str:
        if self.device is not None:
            return self.device.type
        parameter = next(self.model.parameters(), None)
        return "cpu" if parameter is None else parameter.device.type

    # ------------------------------------------------------------------ prediction

    def predict(self, data_loader: Iterable[Any]) -> Iterator[Any]:
        """What the model predicts, batch by batch, in eval mode; nothing is kept in memory.

        Hooks get ``before_predict``, and ``after_predict({"batches": n})`` when the last one has been taken.

        Args:
            data_loader: batches, as for training or without targets.

        Returns:
            An iterator over the outputs for each batch.
        """
        self._dispatch("before_predict")
        batches = 0
        for batch in data_loader:
            if self.device is not None:
                batch = move_to_device(batch, self.device)
            # Not around the loop: between two batches the caller may do what it wants with the model.
            with inference_context(self.model), torch.no_grad(), self._autocast():
                outputs = self.adapter.predict(self.model, batch)
            batches += 1
            yield outputs
        self._dispatch("after_predict", {"batches": batches})

    # ------------------------------------------------------------------ metrics

    def _write_metrics(
        self, loss_dict: Mapping[str, torch.Tensor], data_time: float, prefix: str = "", iter: int | None = None
    ) -> None:
        iteration = self.iter if iter is None else iter
        if (iteration + 1) % self.gather_metric_period == 0:
            self.write_metrics(loss_dict, data_time, iteration, prefix, self.storage)

    @staticmethod
    def write_metrics(
        loss_dict: Mapping[str, torch.Tensor],
        data_time: float,
        cur_iter: int,
        prefix: str = "",
        storage: EventStorage | None = None,
    ) -> None:
        """Put the losses, their sum as ``total_loss``, and ``data_time`` (seconds) into the storage.

        Raises:
            FloatingPointError: a loss on the CPU is NaN or infinite. Losses on a GPU are looked at when they
                are next written, so that no step waits for them.
        """
        storage = storage or get_event_storage()
        values: dict[str, Any] = {
            name: loss.item() if loss.device.type == "cpu" else loss.detach() for name, loss in loss_dict.items()
        }
        total = sum(values.values())
        if "total_loss" not in values:
            values["total_loss"] = total
        if prefix:
            values = {prefix + name: value for name, value in values.items()}
        storage.put_scalars(cur_iter=cur_iter, data_time=data_time, **values)
        if isinstance(total, float) and not math.isfinite(total):
            raise FloatingPointError(f"the loss is NaN or infinite at iteration {cur_iter}: {values}")

    def _serve_requests(self) -> None:
        super()._serve_requests()
        iteration = self.storage.nonfinite.get("total_loss")
        if iteration is not None:
            raise FloatingPointError(f"the loss is NaN or infinite at iteration {iteration}")

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["optimizer"] = self.optimizer.state_dict()
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        state["data"] = self._batches.state_dict()
        state["rng"] = capture_rng()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.optimizer.load_state_dict(state_dict["optimizer"])
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        if "data" in state_dict and not self._batches.load_state_dict(state_dict["data"]):
            logger.warning(
                "The data loader cannot start in the middle of an epoch (its sampler has no set_epoch(epoch, start)): "
                "epoch %d starts from its beginning",
                self._batches.epoch,
            )
        # Restored right before the first step: what comes until then must not draw from it.
        self._rng = state_dict.get("rng")

    def _restore_rng(self) -> None:
        assert self._rng is not None
        if self._batches.position:  # in the middle of an epoch its iterator was there before
            self._batches.prepare()
        restore_rng(self._rng)
        self._rng = None


class AMPTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` in mixed precision, with detectron2's arguments.

    Args:
        grad_scaler: one to use; by default a new one if ``precision`` is float16.
        precision: dtype of the forward pass.
        log_grad_scaler: put the scale into the storage as ``[metric]grad_scaler``.
        **kwargs: as for :class:`SimpleTrainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        gather_metric_period: int = 1,
        zero_grad_before_forward: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        precision: torch.dtype = torch.float16,
        log_grad_scaler: bool = False,
        async_write_metrics: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            data_loader,
            optimizer,
            gather_metric_period,
            zero_grad_before_forward,
            async_write_metrics,
            grad_scaler=grad_scaler,
            precision=precision,
            **kwargs,
        )
        self.log_grad_scaler = log_grad_scaler

    def run_step(self) -> None:
        super().run_step()
        if self.log_grad_scaler and self.grad_scaler is not None:
            self.storage.put_scalar("[metric]grad_scaler", self.grad_scaler.get_scale(), smoothing_hint=False)
