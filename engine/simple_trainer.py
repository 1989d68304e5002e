"""What a step is: a batch, its losses and gradients, an update of the weights."""

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from ..config import ConfigError
from ..hooks.common.optimizers import optimizers_of
from ..hooks.storage.event_storage import EventStorage, get_event_storage
from . import comm
from .checkpoint import unwrap_model
from .checkpoint.state import capture_rng, restore_rng
from .data.epoch_iterator import EpochIterator
from .data.microbatch import split_batch
from .data.transfer import move_to_device
from .evaluation.predictions import outputs_of
from .modeling.adapters import ModelAdapter
from .parallel.base import Strategy, check_strategy, strategy_of
from .ranks.loss_weights import OverRanks, names_to_share
from .solver.several import OptimizerList
from .step.compiled_step import CompiledStep
from .step.cuda_graph import GraphedStep
from .step.fast_path import FastOptimizer, backward
from .step.nonfinite import NonFinitePolicy
from .train_loop import TrainerBase, TrainResult

__all__ = ["SimpleTrainer"]

logger = logging.getLogger(__name__)


class SimpleTrainer(TrainerBase):
    """The usual step: one batch, one loss, one update.

    Each part of :meth:`run_step` is a method a subclass may replace. For anything that does not fit, subclass
    :class:`TrainerBase` and write ``run_step``, or write a loop of your own: the hooks' classes, the storage and
    the writers work there as well.

    Args:
        model: given a batch, returns a dict of losses or one loss (or see ``adapter``). It is set to training mode.
        data_loader: an iterable of batches. When it ends it is started over: that is an epoch.
        optimizer: updates the model's parameters; a list of them: all are stepped together.
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
        nonfinite: what to do about a loss or a gradient that is NaN or infinite: "raise" a FloatingPointError; "skip"
            the update; "stop" training, without the update. The value is logged in any case. On a GPU no step waits to
            find out: fused optimizers skip the update there, and the policy is applied when metrics are next written,
            before anything is evaluated or saved.
        nonfinite_limit: so many iterations in a row without an update are an error.
        compile_step: run forward, backward and update as one graph made by ``torch.compile`` (see
            :class:`~hookline.engine.step.compiled_step.CompiledStep`); a dict: with these arguments for it.
        cuda_graph: capture them in a CUDA graph (see :class:`~hookline.engine.step.cuda_graph.GraphedStep`).
        strategy: how several processes train the model, which it has wrapped; by default DDP for a model in
            DistributedDataParallel.
    """

    # How steps are made as one unit, if they are, and whether it found something NaN or infinite in the present one.
    _whole_step: CompiledStep | GraphedStep | None = None
    _found: torch.Tensor | None = None
    _given_length: int | None = None

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer]",
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
        # Dropout and batch norm behave otherwise in evaluation; whoever wants that calls model.eval() afterwards.
        model.train()
        self.model = model
        self.data_loader = data_loader
        self.optimizer: Any = OptimizerList(optimizer) if isinstance(optimizer, list | tuple) else optimizer
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
        self._given_length = iters_per_epoch
        self._batches = EpochIterator(data_loader, iters_per_epoch, weakref.proxy(self), self.device)
        self._fast = FastOptimizer(self.optimizer)
        self.nonfinite = NonFinitePolicy(nonfinite, nonfinite_limit)
        self._whole_step = _whole_step(compile_step, cuda_graph)
        self._rng: dict[str, Any] | None = None
        self.strategy = strategy or strategy_of(model)
        check_strategy(self.strategy, model, data_loader)
        if not self._same_state_on_all_ranks:
            logger.warning(
                "Strategy %s: each rank has its own weights, and a checkpoint holds rank 0's, so it cannot be resumed. "
                "If all ranks do have the same, set same_state_on_all_ranks = True in the strategy",
                type(self.strategy).__name__,
            )
        self._ranks = OverRanks() if self.strategy.averages and comm.get_world_size() > 1 else None
        # Of all ranks, and the iteration after which they were in that state.
        self._rank_rngs: tuple[int, list[dict[str, Any]]] = (-1, [])

    # ------------------------------------------------------------------ hooks

    def _bind_hooks(self) -> None:
        super()._bind_hooks()
        if self._whole_step is not None:
            self._whole_step.check(self)

    def _warn_of_silent_events(self) -> None:
        super()._warn_of_silent_events()
        if self._whole_step is not None:
            self._whole_step.check_asked(self)

    # ------------------------------------------------------------------ data

    @property
    def _data_loader_iter(self) -> EpochIterator:
        return self._batches

    @_data_loader_iter.setter
    def _data_loader_iter(self, batches: Iterator[Any]) -> None:
        self._batches = EpochIterator(batches, None, weakref.proxy(self), self.device)

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
        """Read from another loader from the next step on.

        The count of epochs continues: if batches of the present epoch were read, the epoch ends with the present step.

        Args:
            data_loader_builder: makes the loader. It is called when the old loader and its workers are gone.
        """
        epoch, begun = self._batches.epoch, self._batches.position > 0
        del self.data_loader, self._batches
        loader = self.data_loader = data_loader_builder()
        self._batches = EpochIterator(loader, self._length_of_epoch(loader), weakref.proxy(self), self.device)
        self._batches.continue_count(epoch, begun)

    def _length_of_epoch(self, data_loader: Iterable[Any]) -> int | None:
        """Iterations in an epoch of another loader, if not its own length."""
        return self._given_length

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
        if self._whole_step is not None and self._run_whole_step(batch, data_time):
            return
        if self.zero_grad_before_forward:
            self.zero_grad()
        self.nonfinite.begin(self)
        if self.accumulation_steps > 1:
            loss_dict = self.accumulate(batch)
        else:
            loss_dict = self.forward_backward(batch, None if self._ranks is None else self._ranks.weigh(self, batch))
        self._write_metrics(loss_dict, data_time)
        self.optimizer_step()
        if not self.zero_grad_before_forward:
            self.zero_grad()

    def _run_whole_step(self, batch: Any, data_time: float) -> bool:
        """Have the step made as one unit; False if it has to be made in parts."""
        done = self._whole_step.run(self, batch)  # type: ignore[union-attr]
        if done is None:
            return False
        losses, self._found = done
        try:
            self._write_metrics(losses, data_time)
        finally:
            self._found = None
        if self.nonfinite.skip_update:  # the unit has not made it
            self.nonfinite.skip_update = False
        elif self._listeners["after_optimizer_step"]:
            self._dispatch("after_optimizer_step")
        return True

    def fetch(self) -> Any:
        """Read the next batch and bring it to the device."""
        listeners = self._listeners
        if listeners["before_fetch"]:
            self._dispatch("before_fetch")
        batch = next(self._batches)
        # Loaders read into the host's memory: for a model on the CPU there is nothing to move.
        if self.device is not None and self.device.type != "cpu":
            batch = move_to_device(batch, self.device)
        if listeners["after_fetch"]:
            self._dispatch("after_fetch", batch)
        return batch

    def to_device(self, batch: Any) -> Any:
        """A batch that is read beside the training, where the model is."""
        return batch if self.device is None else move_to_device(batch, self.device)

    def forward_backward(self, batch: Any, weigh: Callable[[Any], Any] | None = None) -> dict[str, torch.Tensor]:
        """Losses and gradients of one (micro-)batch.

        Args:
            batch: as the loader gave it, or a part of it.
            weigh: called with the number of items that the losses are means over, if the model told it, else None;
                returns the factor that the losses count with.

        Returns:
            The losses by name, each times that factor.
        """
        listeners = self._listeners
        if listeners["before_forward"]:
            self._dispatch("before_forward", batch)
        loss_dict = self.forward(batch)
        if listeners["after_forward"]:
            self._dispatch("after_forward", batch, loss_dict)
        num_items = loss_dict.pop("num_items", None)
        if num_items is not None and weigh is None:
            self.storage.put_scalar("num_items", num_items, smoothing_hint=False)
        if weigh is not None:
            weight = weigh(num_items)
            loss_dict = {name: _weighted(loss, weight) for name, loss in loss_dict.items()}
        first, *others = loss_dict.values()
        losses = sum(others, start=first)
        if listeners["before_backward"]:
            self._dispatch("before_backward", losses)
        self.backward(losses)
        self.after_backward()
        return loss_dict

    def accumulate(self, batch: Any) -> dict[str, torch.Tensor]:
        """Losses and gradients of a batch, one micro-batch at a time: those of the whole batch.

        Each counts by its share of the samples or, where the model tells how many items (tokens) its losses are
        means over, of the items. That share is known only after the last, so gradients are then scaled once.
        """
        ranks = self._ranks
        # FSDP2 gathers parameters in each pass, so every rank needs the same number of passes.
        parts = list(split_batch(batch, self.accumulation_steps, exact=ranks is not None))
        rank_share = ranks.share(self._batches, batch) if ranks is not None else 1.0
        divisor = _at_least_one if ranks is None else ranks.mean
        unit: Any = None
        counts: list[Any] = []
        total: dict[str, torch.Tensor] = {}
        for index, (micro_batch, share) in enumerate(parts):

            def weigh(num_items: Any, share: float = share) -> Any:
                nonlocal unit
                if num_items is None or not share:
                    return share * rank_share
                counts.append(num_items)
                if unit is None:
                    # Relative to the first, so that numbers stay of the size that they are without accumulation.
                    unit = divisor(num_items if ranks is None else comm.all_reduce_sum(num_items))
                return num_items / unit

            # Ranks exchange gradients once a step, with the last micro-batch.
            with self.strategy.no_sync(self.model) if index < len(parts) - 1 else nullcontext():
                losses = self.forward_backward(micro_batch, weigh)
            for name, loss in losses.items():
                total[name] = total[name] + loss.detach() if name in total else loss.detach()
        if counts:
            count = sum(counts) if ranks is None else comm.all_reduce_sum(sum(counts))
            items = count if ranks is None else ranks.in_batch(count)
            self.storage.put_scalar("num_items", items, smoothing_hint=False)
            scale = unit / divisor(count)
            gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(gradients, scale)
            total = {name: loss * scale for name, loss in total.items()}
        return total

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        """The losses of a batch, by name."""
        try:
            if self.precision is None:
                return self.adapter.losses(self.model, batch)
            with self._autocast():
                return self.adapter.losses(self.model, batch)
        except RuntimeError as error:
            explained = self.strategy.explain(error, self.model)
            if explained is None:
                raise
            raise explained from error

    def backward(self, losses: torch.Tensor) -> None:
        """Add the gradients of ``losses`` to the parameters'."""
        if self.grad_scaler is not None:
            losses = self.grad_scaler.scale(losses)
        backward(losses)

    def optimizer_step(self) -> None:
        """Clip the gradients, and update the weights."""
        if self.nonfinite.skip_update:
            self.nonfinite.skip_update = False
            return
        listeners, scaler = self._listeners, self.grad_scaler
        if scaler is not None and (self.clip_gradients is not None or listeners["before_optimizer_step"]):
            for optimizer in _with_gradients(self.optimizer):
                scaler.unscale_(optimizer)
        if self.clip_gradients is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            norm = self.strategy.clip(self.clip_gradients, parameters)
            if norm is not None:
                self.storage.put_scalar("grad_norm", norm)
        if listeners["before_optimizer_step"]:
            self._dispatch("before_optimizer_step")
        if scaler is None:
            self._fast_optimizer().step()
        else:
            optimizers = _with_gradients(self.optimizer)
            for optimizer in optimizers:
                scaler.step(optimizer)
            if optimizers:
                found = [flag for optimizer in optimizers for flag in scaler._found_inf_per_device(optimizer).values()]
                scaler.update()
                self.nonfinite.count_overflow(self, found)
            scale = getattr(scaler, "_scale", None)
            if scale is not None:  # get_scale() would wait for the device
                self.storage.put_scalar("grad_scale", scale, smoothing_hint=False)
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
        if self._fast.optimizer is not self.optimizer:  # somebody gave the trainer another one
            self._fast = FastOptimizer(self.optimizer)
        return self._fast

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
        """Yield what the model predicts, batch by batch, in eval mode; nothing is kept in memory.

        Predictions are made with the weights that evaluations use: averaged ones, where a hook averages them. Hooks get
        ``before_predict``; ``on_predict_end`` when the last output was taken, or the iterator was closed or failed; and
        ``after_predict({"batches": n})`` when the last one was taken. Training goes on when it has ended. Of several
        ranks each predicts its own batches; :func:`~hookline.engine.evaluation.write_predictions` writes all to a file.

        Args:
            data_loader: batches, as for training or without targets.

        Returns:
            An iterator over the outputs for each batch.
        """
        self._dispatch("before_predict")
        # Not what is wrapped: ranks may have different numbers of batches, and must not wait for each other in one.
        model, batches = unwrap_model(self.model), 0

        def predict(model: nn.Module, batch: Any) -> Any:
            with self._autocast():
                return self.adapter.predict(model, batch)

        try:
            for outputs in outputs_of(model, data_loader, predict, self.device):
                batches += 1
                yield outputs
        finally:
            self._dispatch("on_predict_end")
        self._dispatch("after_predict", {"batches": batches})

    # ------------------------------------------------------------------ metrics

    def _write_metrics(
        self, loss_dict: Mapping[str, torch.Tensor], data_time: float, prefix: str = "", iter: int | None = None
    ) -> None:
        """Put the metrics of a step every ``gather_metric_period``, and check its losses and gradients."""
        iteration, found = self.iter if iter is None else iter, None
        try:
            if (iteration + 1) % self.gather_metric_period == 0:
                if self._ranks is not None:
                    self.storage.over_ranks |= names_to_share(loss_dict, prefix)
                self.write_metrics(loss_dict, data_time, iteration, prefix, self.storage)
            else:
                _check_losses(_on_cpu(loss_dict), iteration)
        except FloatingPointError as error:
            found = error
        self.nonfinite.check(self, loss_dict, found)

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
            FloatingPointError: a loss on the CPU is NaN or infinite. No step waits for those on a GPU.
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

    def _check_state(self, requests: set[str]) -> None:
        self.nonfinite.settle(self)
        if not requests.isdisjoint({"on_eval", "on_save"}):
            self.nonfinite.check_weights(self, self.ranks_in_sync)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the trainer.

        Raises:
            FloatingPointError: a step before was by a loss or gradient that is NaN or infinite, or a weight is.
        """
        # A second time for those who save without asking for it: nothing is saved that was not checked.
        self.nonfinite.settle(self)
        self.nonfinite.check_weights(self)
        state = super().state_dict()
        state["nonfinite"] = self.nonfinite.state_dict()
        state["optimizer"] = self.optimizer.state_dict()
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        state["data"] = self._batches.state_dict()
        state["rng"] = capture_rng()
        iteration, rank_rngs = self._rank_rngs
        if rank_rngs and iteration == self.finished_iter:
            state["rng_of_ranks"] = rank_rngs
        if not self._same_state_on_all_ranks:
            state["same_state_on_all_ranks"] = False
        return state

    @property
    def _same_state_on_all_ranks(self) -> bool:
        return comm.get_world_size() == 1 or self.strategy.same_state_on_all_ranks

    def _train(self, *args: Any, **kwargs: Any) -> TrainResult:
        if self._error is not None:  # an earlier run failed, perhaps between backward pass and update
            self._fast_optimizer().zero_grad()
        return super()._train(*args, **kwargs)

    def after_train(self) -> None:
        # A resumed run without a step: what its end draws (an evaluation, say) is what the killed run's end drew.
        if self._rng is not None and self._error is None:
            restore_rng(self._rng)
            self._rng = None
        super().after_train()

    def _gather_state(self) -> None:
        self._rank_rngs = self.finished_iter, comm.all_gather(capture_rng())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if not state_dict.get("same_state_on_all_ranks", True):
            raise ConfigError(
                "the checkpoint cannot be resumed: its run held other weights or optimizer state on each rank "
                "(same_state_on_all_ranks of its strategy is False), and the checkpoint holds rank 0's. To start from "
                "its weights alone, set MODEL.WEIGHTS instead of resuming"
            )
        super().load_state_dict(state_dict)
        try:
            self.optimizer.load_state_dict(state_dict["optimizer"])
        except ValueError as error:
            raise ConfigError(
                f"the checkpoint's optimizer does not fit this one ({error}): it was saved with another model or other "
                "parameter groups. To start from its weights alone, set MODEL.WEIGHTS instead of resuming"
            ) from error
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        if "data" in state_dict and not self._batches.load_state_dict(state_dict["data"]):
            logger.warning(
                "The data loader cannot start in the middle of an epoch (neither set_epoch(epoch, start) nor "
                "state_dict() tells it where; docs/data.md): epoch %d starts from its beginning",
                self._batches.epoch,
            )
        # Restored right before the first step: what comes until then must not draw from it.
        self._rng = _rng_of_this_rank(state_dict)
        self.nonfinite.load_state_dict(state_dict.get("nonfinite", {}))

    def _restore_rng(self) -> None:
        assert self._rng is not None
        if self._batches.begun:  # in the middle of an epoch its iterator was there before
            self._batches.prepare()
        restore_rng(self._rng)
        self._rng = None


def _whole_step(compile_step: bool | Mapping[str, Any], cuda_graph: bool) -> CompiledStep | GraphedStep | None:
    if compile_step is False:
        return GraphedStep() if cuda_graph else None
    if cuda_graph:
        raise ConfigError("SOLVER.COMPILE_STEP and SOLVER.CUDA_GRAPH are two ways to run a step: choose one")
    return CompiledStep({} if compile_step is True else compile_step)


def _with_gradients(optimizer: Any) -> list[Any]:
    """The optimizers that have something to do: scalers refuse those whose parameters all have no gradient."""
    return [
        one
        for one in optimizers_of(optimizer)
        if any(p.grad is not None for group in one.param_groups for p in group["params"])
    ]


def _rng_of_this_rank(state_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """The random generators' state that this rank had; None for a rank that is new: it keeps its own seed.

    On another number of ranks it goes by the share of the batch, so that ranks that share one draw the same.
    """
    of_ranks = state_dict.get("rng_of_ranks", [])
    rank = comm.get_rank() if len(of_ranks) == comm.get_world_size() else comm.get_data_rank()
    if rank < len(of_ranks):
        return of_ranks[rank]
    return state_dict.get("rng") if rank == 0 else None


def _on_cpu(losses: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {name: loss.item() for name, loss in losses.items() if loss.device.type == "cpu"}


def _check_losses(values: Mapping[str, float], iteration: int) -> None:
    if not math.isfinite(sum(values.values())):
        raise FloatingPointError(f"the loss is NaN or infinite at iteration {iteration}: {values}")


def _weighted(loss: torch.Tensor, weight: Any) -> torch.Tensor:
    """``loss * weight``; 0 where nothing counts, since a mean over nothing is NaN."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, loss * weight, 0.0)
    return loss * weight if weight else torch.where(torch.isnan(loss), 0.0, loss) * 0.0


def _at_least_one(count: Any) -> Any:
    """A divisor out of a count that may be 0, or a tensor on a device."""
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
