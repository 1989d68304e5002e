"""From a config to evaluators, the metrics' one among them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...config import CfgNode, ConfigError, Registry
from ...config.slots import Slot
from ..modeling.adapters import ModelAdapter
from .evaluator import DatasetEvaluator
from .metrics import METRIC_REGISTRY, Metric
from .predictions import check_format

__all__ = [
    "EVALUATOR_REGISTRY",
    "MetricsEvaluator",
    "build_evaluator",
    "build_metrics",
    "check_evaluation",
    "check_metrics",
]

EVALUATOR_REGISTRY = Registry("EVALUATOR", DatasetEvaluator)
"""Evaluators for ``TEST.EVALUATOR.NAME``: given ``cfg``, ``dataset_name``, ``metrics`` (those of ``TEST.METRICS``) and
``targets_of`` where they name them, and ``TEST.EVALUATOR.ARGS``."""

EVALUATOR_SLOT = Slot(
    EVALUATOR_REGISTRY, "TEST.EVALUATOR.NAME", offers=("cfg", "dataset_name", "metrics", "targets_of")
)
METRICS_SLOT = Slot(METRIC_REGISTRY, "TEST.METRICS")


@EVALUATOR_REGISTRY.register()
class MetricsEvaluator(DatasetEvaluator):
    """Feeds predictions and targets to metrics, batch by batch; nothing else is kept.

    Args:
        dataset_name: under which the results are returned.
        metrics: by the name of their result. torchmetrics' are moved to the predictions' device.
        targets_of: the targets in a batch; by default the last of ``(x, y)``, or of a dict the entry of a usual name.
    """

    def __init__(
        self,
        dataset_name: str,
        metrics: Mapping[str, Metric],
        targets_of: Callable[[Any], Any] | None = None,
    ) -> None:
        self.dataset_name = dataset_name
        self.metrics = dict(metrics)
        self._targets_of = targets_of or ModelAdapter().targets

    def reset(self) -> None:
        for metric in self.metrics.values():
            metric.reset()

    def process(self, inputs: Any, outputs: Any) -> None:
        targets = self._targets_of(inputs)
        for metric in self.metrics.values():
            if isinstance(metric, nn.Module) and isinstance(outputs, torch.Tensor):
                metric.to(outputs.device)
            metric.update(outputs, targets)

    def evaluate(self) -> dict[str, dict[str, Any]]:
        """``{dataset_name: {metric: value}}``, the same on every rank."""
        return {self.dataset_name: {name: _plain(metric.compute()) for name, metric in self.metrics.items()}}


def build_evaluator(
    cfg: CfgNode, dataset_name: str, targets_of: Callable[[Any], Any] | None = None
) -> DatasetEvaluator:
    """The evaluator ``cfg.TEST.EVALUATOR`` describes, for one test set.

    Args:
        cfg: the whole config.
        dataset_name: of the test set.
        targets_of: the targets in a batch; by default those that ``cfg.MODEL`` describes.

    Raises:
        ConfigError: names or arguments are wrong, or ``MetricsEvaluator`` is to be used without metrics.
    """
    check_metrics(cfg)
    return EVALUATOR_SLOT.build(
        cfg,
        dataset_name=dataset_name,
        metrics=build_metrics(cfg),
        targets_of=targets_of or ModelAdapter(target=cfg.MODEL.TARGET).targets,
    )


def build_metrics(cfg: CfgNode) -> dict[str, Metric]:
    """The metrics of ``cfg.TEST.METRICS``, by name: the metric's own, or its class's in snake_case.

    Raises:
        ConfigError: names or arguments are wrong, or two metrics have one name.
    """
    metrics: dict[str, Metric] = {}
    for i, metric in enumerate(METRICS_SLOT.build(cfg)):
        key = getattr(metric, "name", None) or _snake_case(type(metric).__name__)
        if key in metrics:
            raise ConfigError(
                f"TEST.METRICS[{i}]: there already is a metric named {key!r}; register a subclass of "
                f"{type(metric).__name__}"
            )
        metrics[key] = metric
    return metrics


def check_evaluation(cfg: CfgNode) -> None:
    """Check the evaluator's and the metrics' names and arguments without building anything.

    Raises:
        ConfigError: the first thing wrong.
    """
    check_format(cfg.TEST.PREDICTIONS_FORMAT, "TEST.PREDICTIONS_FORMAT")
    EVALUATOR_SLOT.check(cfg)
    METRICS_SLOT.check(cfg)


def check_metrics(cfg: CfgNode) -> None:
    """Check that there is something to evaluate with. A script that builds its own evaluators does not need it.

    Raises:
        ConfigError: no evaluator is named, or ``MetricsEvaluator`` has no metrics.
    """
    name = cfg.TEST.EVALUATOR.NAME
    if not name:
        raise ConfigError('TEST.EVALUATOR.NAME is empty: set it, for example to "MetricsEvaluator"')
    if not cfg.TEST.METRICS and EVALUATOR_REGISTRY.get(name, "TEST.EVALUATOR.NAME") is MetricsEvaluator:
        raise ConfigError('TEST.METRICS is empty: name what to measure on DATASETS.TEST, such as ["Accuracy"]')


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _plain(value: Any) -> Any:
    """Numbers for tensors: a float for one, a dict by index for several (a metric by class)."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == 1:
        return float(value)
    return {str(i): _plain(item) for i, item in enumerate(value)}
