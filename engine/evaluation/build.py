"""Build evaluators and metrics from a config."""

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, SupportsFloat

import numpy as np
import torch
from torch import nn

from ...config import CfgNode, ConfigError, Registry
from ...config.components import ComponentKey, component, default_name
from ...config.errors import MismatchError
from ...hooks.evaluation import flatten_names
from .. import comm
from ..data.batches import batch_size_of
from ..modeling.adapters import ModelAdapter
from ..modeling.clear_errors import describe, raise_clearer
from ..modeling.outputs import predictions_of
from .evaluator import Batch, DatasetEvaluator, Outputs, Results
from .metrics import METRIC_REGISTRY, FunctionMetric, Loss, Metric, compute

logger = logging.getLogger(__name__)

EVALUATOR_REGISTRY = Registry("EVALUATOR", DatasetEvaluator)
"""Evaluators for ``TEST.EVALUATOR.NAME``. They receive ``TEST.EVALUATOR.ARGS``, and ``cfg``, ``dataset_name``,
``metrics`` (of ``TEST.METRICS``) and ``targets_of`` if they name them."""

EVALUATOR_KEY = ComponentKey(
    EVALUATOR_REGISTRY, "TEST.EVALUATOR.NAME", offers=("cfg", "dataset_name", "metrics", "targets_of")
)
METRICS_KEY = ComponentKey(METRIC_REGISTRY, "TEST.METRICS")


@EVALUATOR_REGISTRY.register()
class MetricsEvaluator(DatasetEvaluator):
    """Updates metrics with predictions and targets, batch by batch.

    A metric whose result is a dict, such as torchmetrics' ``MetricCollection``, adds its entries to the results; under
    a name that was given to it, all of them with that name in front. ``Loss`` adds the terms of a loss of several.

    Args:
        dataset_name: name of the results.
        metrics: metrics by name. Those of torchmetrics are moved to the device of the predictions.
        targets_of: returns the targets in a batch. Default: the last of ``(x, y)``, or the entry of a dict with a usual
            name.
    """

    works_on_parts = True

    def __init__(
        self,
        dataset_name: str,
        metrics: Mapping[str, Metric],
        targets_of: Callable[[Batch], object] | None = None,
    ) -> None:
        self.dataset_name = dataset_name
        self.metrics = dict(metrics)
        self._targets_of = targets_of or ModelAdapter().targets
        own_losses = generating = 0
        for metric in metrics.values():
            own_losses += isinstance(metric, Loss) and metric.of_model
            generating += getattr(metric, "generates", False)
        self.needs_losses = own_losses > 0
        """Whether ``losses`` must be set before each batch is processed."""
        self.losses: Mapping[str, torch.Tensor] = {}
        """The losses that the model computed for the batch."""
        self.generates = generating > 0
        """Whether ``generated`` must be set before each batch is processed: what ``model.generate()`` returned."""
        self.needs_outputs = own_losses + generating < len(metrics)
        self.generated: Outputs = None

    def reset(self) -> None:
        for metric in self.metrics.values():
            metric.reset()

    def process(self, inputs: Batch, outputs: Outputs) -> None:
        targets, forward = None, predictions_of(outputs)
        if self.needs_outputs or self.generates:  # otherwise the batch may have no targets
            targets = self._targets_of(inputs)
        for name, metric in self.metrics.items():
            if isinstance(metric, Loss) and metric.of_model:
                metric.add_losses(self.losses, batch_size_of(inputs))
                continue
            outputs = self.generated if getattr(metric, "generates", False) else forward
            if isinstance(metric, nn.Module) and isinstance(outputs, torch.Tensor):
                metric.to(outputs.device)
            try:
                if isinstance(metric, FunctionMetric | Loss):
                    metric.update(outputs, targets, inputs)
                else:
                    metric.update(outputs, targets)
            except Exception as error:
                if isinstance(outputs, Mapping) and type(metric).__module__.startswith(("hookline.", "torchmetrics.")):
                    raise MismatchError(
                        f"the metric {self.dataset_name}/{name} takes one tensor, the model returned: "
                        f"{', '.join(map(str, outputs))}. Select one with MODEL.OUTPUT_MAPPING, such as "
                        f"{{{next(iter(outputs), 'name')}: preds}}; with MODEL.LOSS its parameter instead of preds"
                    ) from error
                raise_clearer(error)
                error.add_note(
                    f"in update() of the metric {self.dataset_name}/{name}, with {describe(outputs)} as predictions "
                    f"and {describe(targets)} as targets"
                )
                raise

    def evaluate(self) -> Results:
        """``{dataset_name: {metric: value}}``, the same on every rank.

        Raises:
            ConfigError: two metrics have a result of the same name.
            TypeError: a metric's result is not a number, or numbers by name.
        """
        results: Results = {}
        for name, metric in self.metrics.items():
            try:
                value = compute(metric)
            except Exception as error:
                error.add_note(f"in compute() of the metric {self.dataset_name}/{name}")
                raise
            numbers = _numbers(value)
            found = numbers if isinstance(value, Mapping) and name == default_name(metric) else {name: numbers}
            for key in found:
                if key in results:
                    raise ConfigError(f"{self.dataset_name}/{key}: two metrics have a result of this name")
            results.update(found)
        flat = flatten_names(results)
        for name, number in flat.items():
            if not isinstance(number, SupportsFloat):
                raise TypeError(f"the metric {self.dataset_name}/{name} is not a number but {number!r}")
        if comm.get_world_size() > 1:
            self._warn_of_parts({name: float(number) for name, number in flat.items()})
        for metric in self.metrics.values():
            for name, value in metric.terms().items() if isinstance(metric, Loss) else ():
                results.setdefault(name, value)  # a metric may have the name of a term
        return {self.dataset_name: results}

    def _warn_of_parts(self, results: dict[str, float]) -> None:
        """Warn of each result that is not the same on all ranks."""
        ranks = comm.all_gather(results)
        for name in results:
            values = [found.get(name, math.nan) for found in ranks]
            if not np.allclose(values, values[0], rtol=1e-4, equal_nan=True):
                logger.warning(
                    "The metric %s/%s is not that of all samples: it is %s on the ranks. Let its compute() add up "
                    "the ranks, with all_gather() of hookline.engine.comm; or use a function of all predictions",
                    *(self.dataset_name, name, ", ".join(f"{value:.5g}" for value in values)),
                )


def build_evaluator(
    cfg: CfgNode, dataset_name: str, targets_of: Callable[[Batch], object] | None = None
) -> DatasetEvaluator:
    """Build the evaluator of ``cfg.TEST.EVALUATOR`` for one test set.

    Args:
        cfg: the whole config.
        dataset_name: name of the test set.
        targets_of: returns the targets in a batch. Default: as ``cfg.MODEL`` says.

    Raises:
        ConfigError: names or arguments are wrong, or ``MetricsEvaluator`` has no metrics.
    """
    return EVALUATOR_KEY.build(
        cfg,
        dataset_name=dataset_name,
        metrics=check_metrics(cfg),
        targets_of=targets_of or ModelAdapter(target=cfg.MODEL.TARGET).targets,
    )


def build_metrics(cfg: CfgNode) -> dict[str, Metric]:
    """Build the metrics of ``cfg.TEST.METRICS``, by their ``AS``, ``name`` or class name.

    Raises:
        ConfigError: names or arguments are wrong, also if a metric's constructor says so; or two metrics have the same
            name.
    """
    metrics: dict[str, Metric] = {}
    for i, (entry, metric) in enumerate(zip(cfg.TEST.METRICS, METRICS_KEY.build(cfg), strict=True)):
        if not isinstance(metric, Metric):  # a function
            has_names = isinstance(metric, partial) and not metric.args
            function, args = (metric.func, metric.keywords) if has_names else (metric, {})
            metric = FunctionMetric(function, args, cfg.TEST.GENERATE.get("pad_token_id", 0))
        given = entry.get("AS") if isinstance(entry, Mapping) else None
        result = given or default_name(metric)
        if result in metrics:
            raise ConfigError(
                f"TEST.METRICS[{i}]: there is already a metric named {result!r}; give one of them another name, "
                f'{{NAME: "{component(entry)[0]}", AS: "other"}}'
            )
        metrics[result] = metric
    return metrics


def check_metrics(cfg: CfgNode) -> dict[str, Metric]:
    """Check that an evaluator is set, and build its metrics. Also called before training: evaluations may come late.

    Scripts that build their own evaluators need not call it.

    Raises:
        ConfigError: no evaluator is named, ``MetricsEvaluator`` has no metrics, or one cannot be built.
    """
    name = EVALUATOR_KEY.name(cfg)
    if not name:
        raise ConfigError('TEST.EVALUATOR.NAME is empty: set it, for example to "MetricsEvaluator"')
    metrics = build_metrics(cfg)
    if not metrics and EVALUATOR_REGISTRY.get(name, "TEST.EVALUATOR.NAME") is MetricsEvaluator:
        raise ConfigError('TEST.METRICS is empty: name the metrics for DATASETS.TEST, such as ["Accuracy"]')
    return metrics


def _numbers(value: Any) -> Any:
    """Convert a tensor to a float, or to a dict by index if it has several values (a metric per class)."""
    if isinstance(value, Mapping):
        return {name: _numbers(item) for name, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == 1:
        return float(value)
    return {str(i): _numbers(item) for i, item in enumerate(value)}
