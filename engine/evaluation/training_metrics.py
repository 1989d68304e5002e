"""Metrics of the batches of training."""

from collections.abc import Mapping
from typing import Any

import torch

from ...config import CfgNode, ConfigError
from ...hooks.base import HookBase
from ...hooks.common.names import flatten_names
from ..modeling.adapters import ModelAdapter
from .build import TRAIN_METRICS_SLOT, MetricsEvaluator, build_metrics
from .metrics import Metric

__all__ = ["TrainingMetrics", "training_metrics"]


class TrainingMetrics(HookBase):
    """Puts the metrics of each training batch as ``train/<metric>``: smoothed and averaged over ranks, like losses.

    With several micro-batches they are those of the last one. Metrics see what evaluations give them: predictions as
    the model made them for this step, and targets. Saves nothing.

    Args:
        metrics: metrics by name.
        adapter: finds predictions and targets.

    Raises:
        ConfigError: a metric is the model's own loss, which is logged anyway.
    """

    uses_outputs = True

    def __init__(self, metrics: Mapping[str, Metric], adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._evaluator = MetricsEvaluator("train", metrics, lambda batch: adapter.targets(batch, training=True))
        if self._evaluator.needs_losses:
            raise ConfigError("LOG.TRAIN_METRICS: the losses of the model are logged anyway; leave out Loss")

    @torch.no_grad()
    def after_step(self) -> None:
        trainer: Any = self.trainer
        self._evaluator.reset()
        self._evaluator.process(trainer.batch, self._adapter.predictions(trainer.outputs, training=True))
        values = flatten_names(self._evaluator.evaluate(local=True))
        if trainer.ranks_in_sync:
            trainer.storage.over_ranks |= values.keys()
        trainer.storage.put_scalars(**values)


def training_metrics(cfg: CfgNode, adapter: ModelAdapter) -> TrainingMetrics | None:
    """Build the hook of ``cfg.LOG.TRAIN_METRICS``; None if there are none."""
    return TrainingMetrics(build_metrics(cfg, TRAIN_METRICS_SLOT), adapter) if cfg.LOG.TRAIN_METRICS else None
