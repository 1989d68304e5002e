"""Run a model over a data set and evaluate its outputs."""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice, repeat
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...config import CfgNode, ConfigError
from ...config.errors import MismatchError
from ...hooks.common import (
    capture_rng,
    has_shards,
    length_of,
    optimizer_in_eval_mode,
    preserve_rng,
    restore_rng,
    sized,
    unwrap_model,
)
from ...hooks.event_storage import EventStorage, has_event_storage
from ...hooks.protocol import TrainerProtocol
from ...hooks.writers.bars import with_progress
from .. import comm
from ..data.build import NoTrainData
from ..data.loader import move_to_device, whole_pass
from ..modeling.adapters import ModelAdapter
from ..parallel.base import Strategy

logger = logging.getLogger(__name__)

Batch = Any
"""A batch of a loader: a tensor, or tensors in a tuple, dict or dataclass."""
Outputs = Any
"""What a model predicts for a batch: a tensor, or tensors in a tuple, dict or dataclass."""
Results = dict[str, Any]
"""Metrics by test set or task, ``{"digits_test": {"accuracy": 0.99}}``."""
Predict = Callable[[Any, Batch], Outputs]
"""Predicts a batch with a model."""


class EvaluatedTrainer(TrainerProtocol, Protocol):
    """What evaluations and predictions use of a trainer."""

    adapter: ModelAdapter
    strategy: Strategy
    loss_module: Any

    @property
    def device_type(self) -> str: ...
    def move_modules(self) -> None: ...
    def to_device(self, value: Outputs, /) -> Outputs: ...
    def test(self, cfg: CfgNode, model: nn.Module) -> Results: ...


class Builder(Protocol):
    """What evaluations use of a trainer's class."""

    def build_train_loader(self, cfg: CfgNode) -> Iterable[Batch]: ...
    def build_test_loader(self, cfg: CfgNode, dataset_name: str) -> Iterable[Batch]: ...
    def build_adapter(self, cfg: CfgNode) -> ModelAdapter: ...
    def build_evaluator(self, cfg: CfgNode, dataset_name: str) -> "DatasetEvaluator": ...


class DatasetEvaluator:
    """Evaluates the outputs for a whole data set, batch by batch.

    An evaluator keeps what it needs of each batch (if possible counts, not predictions), and combines the ranks in
    :meth:`evaluate`, which every rank calls.

    Attributes:
        works_on_parts: whether ``evaluate()`` works after any number of batches. If so, the check before training
            (``TEST.SANITY_CHECK_BATCHES``) calls it too.
    """

    works_on_parts = False

    def reset(self) -> None:
        """Clear the state; called before the first batch."""

    def process(self, inputs: Batch, outputs: Outputs) -> None:
        """Process one batch.

        Args:
            inputs: the batch, on the model's device.
            outputs: the model's predictions for it.
        """

    def evaluate(self) -> Results | None:
        """Compute the results over all batches and ranks.

        Returns:
            Metrics by task or data set, ``{"digits_test": {"accuracy": 0.99}}``; None if this rank has none to report.
        """


class DatasetEvaluators(DatasetEvaluator):
    """Several evaluators as one, with merged results.

    Args:
        evaluators: evaluators with different names of results.
    """

    def __init__(self, evaluators: Iterable[DatasetEvaluator]) -> None:
        self._evaluators = list(evaluators)

    def reset(self) -> None:
        for evaluator in self._evaluators:
            evaluator.reset()

    def process(self, inputs: Batch, outputs: Outputs) -> None:
        for evaluator in self._evaluators:
            evaluator.process(inputs, outputs)

    def evaluate(self) -> Results:
        results: Results = {}
        for evaluator in self._evaluators:
            found = evaluator.evaluate() or {}
            if shared := results.keys() & found.keys():
                raise ValueError(f"two evaluators return results named {sorted(shared)}; give them different names")
            results.update(found)
        return results


def inference_on_dataset(
    model: nn.Module | Callable[[Batch], Outputs],
    data_loader: Iterable[Batch],
    evaluator: DatasetEvaluator | Sequence[DatasetEvaluator] | None,
    callbacks: Mapping[str, Callable[[], None]] | None = None,
    *,
    predict: Predict | None = None,
    device: torch.device | str | None = None,
    name: str = "",
    progress_bar: bool = True,
) -> Results:
    """Run a model over all batches of a loader and evaluate its predictions.

    The model is in eval mode. Afterwards every submodule is in its previous mode.

    Args:
        model: a module, or any callable.
        data_loader: batches.
        evaluator: one, or several, or None to run the model only.
        callbacks: functions without arguments, by event: "on_start", "before_inference" and "after_inference" (around
            each batch), "on_end".
        predict: ``predict(model, batch)``. Default: ``model(batch)``.
        device: device for the batches. Default: that of the model's first parameter.
        name: of the data set, for messages. If it is given, all ranks call this function.
        progress_bar: show a bar in a terminal or a notebook; otherwise a log line every ten seconds.

    Returns:
        The evaluator's results; empty, with a warning, if there are no batches.
    """
    if evaluator is None or not isinstance(evaluator, DatasetEvaluator):
        evaluator = DatasetEvaluators(evaluator or [])
    callbacks, predict = callbacks or {}, predict or _forward
    if device is None and isinstance(model, nn.Module):
        device = next((parameter.device for parameter in model.parameters()), None)

    emit, max_batches = _CONTEXTS[-1] if _CONTEXTS else (_nothing, None)
    evaluator.reset()
    ran = False
    # Not inference_mode: tensors that outlive it (a metric's sums, a module's cache) could not be used in training.
    with inference_context(model), torch.no_grad(), scratch_storage():
        callbacks.get("on_start", _nothing)()
        batches: Iterable[tuple[Batch, int | None]] = islice(whole_pass(data_loader), max_batches)
        if comm.is_main_process():
            total = length_of(data_loader)
            if max_batches is not None:
                total = max_batches if total is None else min(total, max_batches)
            batches = with_progress(batches, total, f"Evaluating {name}", progress_bar)
        for (batch, number), counts in counted(model, batches):
            ran = True
            if device is not None and torch.device(device).type != "cpu":  # loaders read into the host's memory
                batch = move_to_device(batch, device)
            if not counts:  # another rank needs this rank's parameters, or counts this batch
                predict(model, batch)
                continue
            with sized(batch, number):
                emit("before_eval_step", batch)
                callbacks.get("before_inference", _nothing)()
                outputs = predict(model, batch)
                callbacks.get("after_inference", _nothing)()
                evaluator.process(batch, outputs)
                emit("after_eval_step", batch, outputs)
        callbacks.get("on_end", _nothing)()
    if not (any(comm.all_gather(ran)) if name else ran or comm.get_world_size() > 1):
        logger.warning("%s has no samples: it has no results", name or "The test data")
        return {}
    if max_batches is not None and not evaluator.works_on_parts:
        return {}
    return evaluator.evaluate() or {}


def _forward(model: Callable[[Batch], Outputs], batch: Batch) -> Outputs:
    return model(batch)


def _nothing(*args: object) -> None:
    pass


@contextmanager
def scratch_storage(iteration: int = 0) -> Iterator[None]:
    """Open a storage that is then discarded, if none is open, for hooks and models outside of training."""
    if has_event_storage():
        yield
        return
    with EventStorage(iteration) as storage:
        storage.of_run = False
        yield


@contextmanager
def inference_context(model: object) -> Iterator[None]:
    """Set eval mode; on exit every submodule is back in its previous mode.

    Args:
        model: a module. Other objects are not changed.
    """
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    if isinstance(model, nn.Module):
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def initialized(model: nn.Module, cfg: CfgNode, parts: Builder) -> nn.Module:
    """Return a model whose lazy modules, such as ``LazyLinear``, have weights, by the shapes of a training batch.

    Its other modules do not change: they are in eval mode.

    Args:
        model: any. Without lazy modules nothing is done.
        cfg: the whole config.
        parts: a trainer's class, or another object with its ``build_train_loader`` and ``build_adapter``.

    Raises:
        ConfigError: the training data can be read only once.
    """
    if not any(map(is_lazy, model.parameters())) or isinstance(loader := parts.build_train_loader(cfg), NoTrainData):
        return model
    if iter(loader) is loader:
        raise ConfigError("MODEL: the data can be read only once; call the model once for the weights of lazy modules")
    batch, _ = next(whole_pass(loader))
    # In training mode for its losses, which a module in it may compute: that stays in eval mode and returns others.
    with inference_context(model), torch.no_grad(), suppress(MismatchError):
        model.training = True
        parts.build_adapter(cfg).losses(model, move_to_device(batch, next(model.parameters()).device))
    return model


def predictions(
    trainer: Any,  # a method of SimpleTrainer: a Protocol here would refer to itself
    data_loader: Iterable[Batch],
    with_batches: bool = False,
    predict: Predict | None = None,
) -> Iterator[Outputs]:
    """Yield the model's outputs for each batch, in eval mode, with the weights that evaluations use.

    It is ``trainer.predict(data_loader)``. Each rank predicts its own batches;
    :func:`~hookline.engine.evaluation.write_predictions` writes those of all ranks to a file. For the events see
    :class:`~hookline.hooks.HookBase`: ``on_predict_end`` comes after the last output, or when the iterator is closed or
    fails; ``after_predict`` only after the last output.

    Consume all of them: with a sharded model (FSDP2) each batch needs all ranks. If ranks share a batch, only the first
    yields it.

    Args:
        trainer: the trainer.
        data_loader: batches, as for training or without targets.
        with_batches: yield pairs of a batch, on the model's device, and its outputs.
        predict: called with model and batch. Default: the adapter's ``predict``.
    """
    trainer.move_modules()
    return _with_own_rng(_predictions(trainer, data_loader, with_batches, predict or trainer.adapter.predict))


def _with_own_rng(items: Generator[Any, None, None]) -> Iterator[Any]:
    """Yield a generator's items, as if it drew from generators of random numbers of its own, at first copies."""
    own = None
    try:
        while True:
            with preserve_rng():
                if own is not None:
                    restore_rng(own)
                item = next(items, _END)
                own = capture_rng()
            if item is _END:
                return
            yield item
    finally:
        with preserve_rng():
            items.close()


def _predictions(
    trainer: EvaluatedTrainer, data_loader: Iterable[Batch], with_batches: bool, predict: Predict
) -> Generator[Outputs, None, None]:
    with scratch_storage(trainer.iter):
        trainer.emit("before_predict")
    # Unwrapped: the ranks may have different numbers of batches, and must not wait for each other.
    model, batches = unwrap_model(trainer.model), 0
    try:
        with optimizer_in_eval_mode(trainer.optimizer):
            for (batch, number), counts in counted(model, whole_pass(data_loader)):
                if trainer.device_type != "cpu":  # loaders read into the host's memory
                    batch = trainer.to_device(batch)
                # The caller may change the model's mode between batches, so it is set for each.
                with inference_context(model), torch.no_grad(), scratch_storage():
                    outputs = predict(model, batch)
                if counts:
                    batches += 1
                    with sized(batch, number):
                        yield (batch, outputs) if with_batches else outputs
    finally:
        with scratch_storage(trainer.iter):
            trainer.emit("on_predict_end")
    with scratch_storage(trainer.iter):
        trainer.emit("after_predict", {"batches": batches})


def counted(model: object, batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield the batches to run the model on, and whether their outputs count. Each sample counts once.

    If the forward pass gathers parameters from other ranks (FSDP2), a rank without further batches repeats its last one
    while another rank has more. Ranks that share a batch count it once.

    Args:
        model: the model to run.
        batches: batches of this rank, any number.
    """
    is_first = comm.is_first_of_data_rank()
    if comm.get_world_size() == 1 or not isinstance(model, nn.Module) or not has_shards(model):
        for batch in batches:
            yield batch, is_first
        return
    last = _END
    for batch in chain(batches, repeat(_END)):
        counts = batch is not _END
        if counts:
            last = batch
        # 2: has a batch that counts, 1: could repeat one, 0: has none at all.
        states: list[int] = comm.all_gather(2 if counts else int(last is not _END))
        if 2 not in states:
            return
        if 0 in states:  # a rank without any share of the data works on another's
            lent = comm.broadcast_object(move_to_device(batch, "cpu") if counts else None, src=states.index(2))
            last = lent if last is _END else last
        yield last, counts and is_first


_END: Any = object()

# (emit, max_batches) of the active evaluation_context()s.
_CONTEXTS: list[tuple[Callable[..., None], int | None]] = []


@contextmanager
def evaluation_context(emit: Callable[..., None] | None, max_batches: int | None = None) -> Iterator[None]:
    """Make every :func:`inference_on_dataset` within it emit events.

    Args:
        emit: called as ``emit("before_eval_step", batch)`` and ``emit("after_eval_step", batch, outputs)``;
            None: no events.
        max_batches: batches per data set, at most. Evaluators that do not work on parts return no results then.
    """
    _CONTEXTS.append((emit or _nothing, max_batches))
    try:
        yield
    finally:
        _CONTEXTS.pop()


def evaluates_for_trainer() -> bool:
    """Whether an :func:`evaluation_context` is active: a trainer evaluates its own model."""
    return bool(_CONTEXTS)
