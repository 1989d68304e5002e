"""Running a model over a data set, and the evaluators that judge what comes out."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

from ..data.transfer import move_to_device
from ..data.whole_pass import whole_pass
from .lockstep import counted

__all__ = [
    "DatasetEvaluator",
    "DatasetEvaluators",
    "evaluation_context",
    "inference_context",
    "inference_on_dataset",
]

logger = logging.getLogger(__name__)


class DatasetEvaluator:
    """Judges the outputs for a whole data set, fed batch by batch.

    Evaluators keep what they need of each batch (counts, if possible, not predictions) and combine the ranks'
    shares in :meth:`evaluate`, which every rank calls.
    """

    def reset(self) -> None:
        """Forget everything; called before the first batch."""

    def process(self, inputs: Any, outputs: Any) -> None:
        """Take in one batch.

        Args:
            inputs: the batch as the loader gave it, on the model's device.
            outputs: what the model predicted for it.
        """

    def evaluate(self) -> dict[str, Any] | None:
        """Combine what has been processed.

        Returns:
            Metrics by the name of their task or data set, ``{"digits_test": {"accuracy": 0.99}}``. None: nothing
            to report (on this rank).
        """


class DatasetEvaluators(DatasetEvaluator):
    """Several evaluators as one, whose results are put together.

    Args:
        evaluators: their results must not share a name.
    """

    def __init__(self, evaluators: Iterable[DatasetEvaluator]) -> None:
        self._evaluators = list(evaluators)

    def reset(self) -> None:
        for evaluator in self._evaluators:
            evaluator.reset()

    def process(self, inputs: Any, outputs: Any) -> None:
        for evaluator in self._evaluators:
            evaluator.process(inputs, outputs)

    def evaluate(self) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for evaluator in self._evaluators:
            part = evaluator.evaluate() or {}
            if shared := results.keys() & part.keys():
                raise ValueError(f"two evaluators return results named {sorted(shared)}; give them different names")
            results.update(part)
        return results


def inference_on_dataset(
    model: nn.Module | Callable[[Any], Any],
    data_loader: Iterable[Any],
    evaluator: DatasetEvaluator | Sequence[DatasetEvaluator] | None,
    callbacks: Mapping[str, Callable[[], None]] | None = None,
    *,
    predict: Callable[[Any, Any], Any] | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Run a model over all batches of a loader and evaluate what it predicts.

    The model is put in eval mode, and afterwards every submodule back in the mode it was in.

    Args:
        model: a module, or any callable.
        data_loader: batches.
        evaluator: one, or several, or None to run the model only.
        callbacks: functions without arguments by the place they are called at: "on_start", "before_inference",
            "after_inference" (these two around each batch's prediction), "on_end".
        predict: ``predict(model, batch)``; by default ``model(batch)``.
        device: where batches are moved to; by default to the model's first parameter, if it has one.

    Returns:
        The evaluator's results; empty if there are none.
    """
    if evaluator is None or not isinstance(evaluator, DatasetEvaluator):
        evaluator = DatasetEvaluators(evaluator or [])
    call = {name: (callbacks or {}).get(name, _nothing) for name in CALLBACKS}
    if device is None and isinstance(model, nn.Module):
        device = next((parameter.device for parameter in model.parameters()), None)

    emit, max_batches = _CONTEXTS[-1] if _CONTEXTS else (_nothing, None)
    evaluator.reset()
    start, compute_time, batches = time.perf_counter(), 0.0, 0
    # no_grad and not inference_mode: tensors made in inference mode that stay (a metric's sums, a cache a module
    # fills in its first forward) could not be used in training afterwards.
    with inference_context(model), torch.no_grad():
        call["on_start"]()
        own = islice(whole_pass(data_loader), max_batches)
        for batch, counts in counted(model, own):
            if device is not None:
                batch = move_to_device(batch, device)
            if not counts:  # another rank needs this one's parameters, or counts the batch itself
                model(batch) if predict is None else predict(model, batch)
                continue
            emit("before_eval_step", batch)
            call["before_inference"]()
            compute_start = time.perf_counter()
            outputs = model(batch) if predict is None else predict(model, batch)
            compute_time += time.perf_counter() - compute_start
            call["after_inference"]()
            evaluator.process(batch, outputs)
            emit("after_eval_step", batch, outputs)
            batches += 1
        call["on_end"]()
    results = evaluator.evaluate()
    total_time = time.perf_counter() - start
    logger.debug(
        "Inference on %d batches took %.2f s (%.1f batches/s; the model's share %.2f s)",
        batches,
        total_time,
        batches / total_time,
        compute_time,
    )
    return {} if results is None else results


@contextmanager
def inference_context(model: Any) -> Iterator[None]:
    """Eval mode inside; on leaving, also by an exception, every submodule is in the mode it was in before.

    Args:
        model: a module; of anything else nothing is changed.
    """
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    if isinstance(model, nn.Module):
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# What evaluations that run inside of evaluation_context() tell whom, and how far they go.
_CONTEXTS: list[tuple[Callable[..., None], int | None]] = []


@contextmanager
def evaluation_context(emit: Callable[..., None], max_batches: int | None = None) -> Iterator[None]:
    """Have every :func:`inference_on_dataset` inside, whoever calls it, tell of its batches.

    Args:
        emit: called as ``emit("before_eval_step", batch)`` and ``emit("after_eval_step", batch, outputs)``.
        max_batches: go no further than so many batches of each set.
    """
    _CONTEXTS.append((emit, max_batches))
    try:
        yield
    finally:
        _CONTEXTS.pop()


CALLBACKS = ("on_start", "before_inference", "after_inference", "on_end")


def _nothing(*args: Any) -> None:
    pass
