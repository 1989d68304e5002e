"""A trainer with a model and data: epochs, devices, prediction, metrics, state. ``simple_trainer.py`` has its step."""

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..config import ConfigError
from ..hooks.storage.event_storage import EventStorage, get_event_storage
from ..hooks.storage.scratch import scratch_storage
from . import comm
from .checkpoint import unwrap_model
from .data.epoch_iterator import EpochIterator
from .data.transfer import move_to_device
from .evaluation.collect import collect
from .evaluation.predictions import outputs_of
from .modeling.adapters import ModelAdapter
from .parallel.base import Strategy, check_same_weights, own_method
from .run_state import OPEN_STORAGE
from .step.fused_step import FusedStep
from .step.nonfinite import NonFinitePolicy
from .step.old_methods import adapt_old_methods, split_data_time
from .step.random_state import RandomState
from .step.scheduled_step import ScheduledStep
from .step.step_outputs import KeptForHooks, StepOutputs
from .step.turns import Turns
from .train_loop import TrainerBase, TrainResult

__all__ = ["ModelTrainer"]

logger = logging.getLogger(__name__)


class ModelTrainer(TrainerBase):
    """The part of a :class:`~hookline.engine.SimpleTrainer` that is not the step itself.

    Attributes:
        model: the model, wrapped for several processes if there are several.
        data_loader: the loader of training batches.
        optimizer: the optimizer, or an OptimizerList.
        adapter: calls the model and reads its outputs.
        precision: dtype for torch.autocast, or None.
        device: where batches are moved, or None.
        batch: the batch of the last forward pass (with SOLVER.ACCUMULATION_STEPS a micro-batch), until the step ends.
            It and ``outputs`` are kept only if a hook has ``uses_outputs = True``.
        outputs: what the model returned in that pass.
        sample_indices: the indices of the samples in the step's batch, on this rank, in the order of the batch. Only
            if a hook has ``uses_indices = True``.
    """

    model: nn.Module
    data_loader: Iterable[Any]
    optimizer: Any
    adapter: ModelAdapter
    precision: torch.dtype | None = None
    device: torch.device | None = None
    _batches: EpochIterator
    _given_length: int | None = None
    grad_scaler: torch.amp.GradScaler | None
    nonfinite: NonFinitePolicy
    strategy: Strategy
    gather_metric_period: int
    _averaging_ranks: int
    _step_begun = False  # by a subclass's own before_step: see old_methods.py
    _whole_step: FusedStep | ScheduledStep | Turns | None = None
    batch = KeptForHooks()
    outputs = KeptForHooks()

    def __init__(self) -> None:
        super().__init__()
        self._random_state = RandomState()
        self._step_outputs = StepOutputs(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adapt_old_methods(cls, ModelTrainer)

    # ------------------------------------------------------------------ epochs and data

    @property
    def _data_loader_iter(self) -> EpochIterator:
        return self._batches

    @_data_loader_iter.setter
    def _data_loader_iter(self, batches: Iterator[Any]) -> None:
        self._batches = EpochIterator(batches, None, weakref.proxy(self), self.device)
        self._follow_indices()

    @_data_loader_iter.deleter
    def _data_loader_iter(self) -> None:  # ported code does it before it sets another
        del self._batches

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self._batches.epoch

    @property
    def iters_per_epoch(self) -> int | None:  # type: ignore[override]
        return self._batches.length

    @property
    def epoch_ended(self) -> bool:  # type: ignore[override]
        return self._batches.ended

    @property
    def sample_indices(self) -> Any:
        return self._batches.indices

    def _follow_indices(self) -> None:
        if hasattr(self, "_batches"):
            self._batches.follow_indices(any(hook.uses_indices for hook in self._hooks))

    def reset_data_loader(self, data_loader_builder: Callable[[], Iterable[Any]]) -> None:
        """Replace the data loader, from the next step on.

        The count of epochs continues. If batches of the present epoch were read, the epoch ends with the present step.

        Args:
            data_loader_builder: creates the loader. It is called after the old loader and its workers are deleted.
        """
        epoch, begun = self._batches.epoch, self._batches.position > 0
        del self.data_loader, self._batches
        loader = self.data_loader = data_loader_builder()
        self._batches = EpochIterator(loader, self._length_of_epoch(loader), weakref.proxy(self), self.device)
        self._follow_indices()
        self._batches.continue_count(epoch, begun)

    def _length_of_epoch(self, data_loader: Iterable[Any]) -> int | None:
        """Return the iterations per epoch of a new loader; None if they are its length."""
        return self._given_length

    def skip_epoch(self) -> None:
        """End the epoch with the present step; the next step starts from the beginning of the data."""
        self._batches.skip_epoch()

    def before_step(self) -> None:
        if not self._step_begun:
            self._begin_step()
        self._dispatch("before_step")

    def _begin_step(self) -> None:
        """Do what a step begins with, before the hooks' ``before_step``."""
        self.storage.iter = self.iter
        batches = self._batches
        if batches.ended:
            batches.next_epoch()
        if self._joined or self._left:
            self._change_hooks()
        if batches.position == 0 or self.iter == self.start_iter:
            self.before_epoch()
        if self._random_state.pending is not None:
            self._random_state.restore(batches)

    # ------------------------------------------------------------------ devices

    def to_device(self, batch: Any) -> Any:
        """Move a batch that is not read by a step to the model's device."""
        return batch if self.device is None else move_to_device(batch, self.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self._device_type(), dtype=self.precision)

    def _device_type(self) -> str:
        if self.device is not None:
            return self.device.type
        parameter = next(self.model.parameters(), None)
        return "cpu" if parameter is None else parameter.device.type

    def _move_modules(self) -> None:
        """Move modules that are attributes of the trainer, such as a metric or a second model, to its device."""
        for value in [*vars(self).values(), self.adapter.loss if isinstance(self.adapter, ModelAdapter) else None]:
            if isinstance(value, nn.Module) and value is not self.model and self.device is not None:
                value.to(self.device)

    # ------------------------------------------------------------------ several ranks

    def gather(self, value: Any) -> Any:
        """Collective. Return the values of all ranks, concatenated in the order of ranks, on the trainer's device.

        Args:
            value: a tensor (a scalar counts as one element), an array, a list, or a dict or tuple of these.
        """
        if isinstance(value, torch.Tensor) and not value.dim():
            value = value.reshape(1)
        return self.to_device(collect([value]))

    def print(self, *values: Any, **options: Any) -> None:
        """Call ``print`` on rank 0 only."""
        if comm.is_main_process():
            print(*values, **options)

    # ------------------------------------------------------------------ evaluation and prediction

    @torch.no_grad()
    def eval_losses(self, batch: Any, outputs: Any) -> dict[str, Any]:
        """Return the losses of a batch of an evaluation, with the arguments that ``after_eval_step`` receives.

        Returns:
            Scalar tensors by name, and perhaps ``num_items``, as a training step has them. A model that computes its
            own losses and returned none in eval mode is called a second time.
        """
        return self.adapter.losses_of_predictions(unwrap_model(self.model), batch, outputs)

    def predict(
        self,
        data_loader: Iterable[Any],
        with_batches: bool = False,
        predict: Callable[[nn.Module, Any], Any] | None = None,
    ) -> Iterator[Any]:
        """Yield the model's outputs for each batch, in eval mode, with the weights that evaluations use.

        Hooks receive ``before_predict``; ``on_predict_end`` after the last output, or when the iterator is closed or
        fails; and then ``after_predict({"batches": n})``, only after the last output. Each rank predicts its own
        batches; :func:`~hookline.engine.evaluation.write_predictions` writes those of all ranks to a file.

        Args:
            data_loader: batches, as for training or without targets.
            with_batches: yield pairs of a batch, on the model's device, and its outputs.
            predict: called with model and batch. Default: the adapter's ``predict``.
        """
        with scratch_storage(self.iter):
            self._dispatch("before_predict")
        # Unwrapped: the ranks may have different numbers of batches, and must not wait for each other.
        model, batches = unwrap_model(self.model), 0
        run = predict or self.adapter.predict

        def pair(model: nn.Module, batch: Any) -> Any:
            return batch, run(model, batch)

        try:
            for outputs in outputs_of(model, data_loader, pair if with_batches else run, self.device):
                batches += 1
                yield outputs
        finally:
            with scratch_storage(self.iter):
                self._dispatch("on_predict_end")
        with scratch_storage(self.iter):
            self._dispatch("after_predict", {"batches": batches})

    # ------------------------------------------------------------------ the losses of a step

    def _write_metrics(
        self,
        loss_dict: Mapping[str, torch.Tensor],
        data_time: float | None = None,
        prefix: str = "",
        iter: int | None = None,
    ) -> None:
        """Put the metrics of a step every ``gather_metric_period``, and check its losses and gradients.

        If ``data_time`` is not given, it is an entry of ``loss_dict``.
        """
        if data_time is None:
            loss_dict, data_time = split_data_time(loss_dict)
        storage, error = self.storage, None
        if storage is OPEN_STORAGE:  # another trainer calls the steps
            self.iter = storage.iter
        iteration = self.iter if iter is None else iter
        try:
            if (iteration + 1) % self.gather_metric_period == 0:
                if self._averaging_ranks > 1:
                    storage.average_over_ranks(prefix + name for name in (*loss_dict, "total_loss"))
                self.write_metrics(loss_dict, data_time, iteration, prefix, storage)
            else:
                on_cpu = {name: loss.item() for name, loss in loss_dict.items() if loss.device.type == "cpu"}
                _check_finite(sum(on_cpu.values()), on_cpu, iteration)
        except FloatingPointError as found:
            error = found
        self.nonfinite.check(self, loss_dict, error)

    @staticmethod
    def write_metrics(
        loss_dict: Mapping[str, torch.Tensor],
        data_time: float,
        cur_iter: int | str | None = None,
        prefix: str = "",
        storage: EventStorage | None = None,
    ) -> None:
        """Put the losses, their sum as ``total_loss``, and ``data_time`` (seconds) into the storage.

        Raises:
            FloatingPointError: a loss on the CPU is NaN or infinite. Losses on a GPU are not waited for.
        """
        storage = storage or get_event_storage()
        if isinstance(cur_iter, str):  # early versions of detectron2 have the prefix here
            prefix, cur_iter = cur_iter, None
        cur_iter = storage.iter if cur_iter is None else cur_iter
        values: dict[str, Any] = {
            name: loss.item() if loss.device.type == "cpu" else loss.detach() for name, loss in loss_dict.items()
        }
        total = sum(values.values())
        if "total_loss" not in values:
            values["total_loss"] = total
        if prefix:
            values = {prefix + name: value for name, value in values.items()}
        storage.put_scalars(cur_iter=cur_iter, data_time=data_time, **values)
        if type(total) is float and total - total != 0.0:  # only if it is NaN or infinite
            _check_finite(total, values, cur_iter)

    # ------------------------------------------------------------------ checks

    def _bind_hooks(self) -> None:
        super()._bind_hooks()
        if self._step_outputs.bind(self._hooks):
            for event in ("after_step", "after_train"):  # after all hooks
                self._listeners[event] += (self._listener(self._step_outputs, event),)
        self._follow_indices()
        if self._whole_step is not None:
            self._whole_step.check(self)

    def _first_step_done(self) -> None:
        super()._first_step_done()
        if self._whole_step is not None:
            self._whole_step.check_called(self)

    def _train(self, *args: Any, **kwargs: Any) -> TrainResult:
        self._move_modules()
        if self._error is not None:  # an earlier run failed, perhaps between backward pass and update
            self.optimizer.zero_grad()
        return super()._train(*args, **kwargs)

    def _gather_state(self) -> None:
        self.strategy.before_save(self.model, self.optimizer)
        self._random_state.gather(self.finished_iter)

    def after_train(self) -> None:
        # A resumed run without a step: an evaluation at its end must draw the numbers that the killed run's drew.
        if self._error is None:
            self._random_state.restore()
        super().after_train()

    def _check_state(self, requests: set[str]) -> None:
        self.nonfinite.settle(self, self.ranks_in_sync)
        if not requests.isdisjoint({"on_eval", "on_save", "on_extra_save"}):
            self.nonfinite.check_weights(self, self.ranks_in_sync)
            # At the end, where iter is past the last iteration, all ranks are here, whatever hooks they have.
            together = self._agreement is not None and (self.ranks_in_sync or self.iter > self._finished)
            made_equal = own_method(self.strategy, "before_save") is not None
            if together and self.strategy.same_state_on_all_ranks and not made_equal:
                check_same_weights(self.model, self._finished)

    def _settings(self) -> dict[str, Any]:
        if not self.strategy.same_state_on_all_ranks:
            return {}
        return {
            f"{key!r} of parameter group {number}": value
            for number, group in enumerate(self.optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, int | float | tuple)
        }

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint; the model's weights are saved beside it.

        Raises:
            FloatingPointError: a weight, or a loss or gradient of an earlier step, is NaN or infinite.
        """
        # User code may save without request_save(), so the state is checked here as well.
        self.nonfinite.settle(self)
        self.nonfinite.check_weights(self)
        state = super().state_dict()
        state["nonfinite"] = self.nonfinite.state_dict()
        state["optimizer"] = self.optimizer.state_dict()
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        state["data"] = self._batches.state_dict()
        state |= self._random_state.state_dict(self.finished_iter)
        if comm.get_world_size() > 1 and not self.strategy.same_state_on_all_ranks:
            state["same_state_on_all_ranks"] = False
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ConfigError: the state is not this trainer's; the message says what to do.
        """
        if self._running:
            return super().load_state_dict(state_dict)
        advice = "To start from its weights alone, set MODEL.WEIGHTS instead of resuming"
        if not state_dict.get("same_state_on_all_ranks", True):
            raise ConfigError(
                "the checkpoint cannot be resumed: its run held other weights or optimizer state on each rank "
                f"(same_state_on_all_ranks of its strategy is False), and the checkpoint holds rank 0's. {advice}"
            )
        if "optimizer" not in state_dict:
            raise ConfigError(
                "the checkpoint cannot be resumed: it has no optimizer state where hookline saves it. Was it "
                f"saved by detectron2? {advice}"
            )
        super().load_state_dict(state_dict)
        try:
            self.optimizer.load_state_dict(state_dict["optimizer"])
        except ValueError as error:
            raise ConfigError(
                f"the checkpoint's optimizer does not fit this one ({error}): it was saved with another model or other "
                f"parameter groups. {advice}"
            ) from error
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        if "data" in state_dict and not self._batches.load_state_dict(state_dict["data"]):
            logger.warning(
                "The data loader cannot start in the middle of an epoch (it has neither set_epoch(epoch, start) nor "
                "state_dict(); see docs/data.md): epoch %d starts from its beginning",
                self._batches.epoch,
            )
        self._random_state.load_state_dict(state_dict)
        self.nonfinite.load_state_dict(state_dict.get("nonfinite", {}))


def _check_finite(total: Any, values: Mapping[str, Any], iteration: int) -> None:
    if isinstance(total, float) and not math.isfinite(total):
        raise FloatingPointError(f"the loss is NaN or infinite at iteration {iteration}: {values}")
