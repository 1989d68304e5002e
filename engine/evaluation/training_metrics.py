"""Metrics of the batches of training."""

from collections.abc import Mapping
from typing import Any

import torch

from ...config import CfgNode, ConfigError
from ...hooks.base import HookBase
from ...hooks.common.tensors import gathered
from ...hooks.evaluation import flatten_names
from .build import TRAIN_METRICS_SLOT, MetricsEvaluator, build_metrics
from .metrics import Metric

__all__ = ["TrainingMetrics", "training_metrics"]


class TrainingMetrics(HookBase):
    """Puts the metrics of each training batch as ``train/<metric>``: smoothed and averaged over ranks, like losses.

    With several micro-batches they are those of the last one. Metrics see what evaluations give them: predictions as
    the model made them for this step, and targets. Saves nothing.

    Args:
        metrics: metrics by name.

    Raises:
        ConfigError: a metric is the model's own loss, which is logged anyway.
    """

    uses_outputs = True

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._evaluator = MetricsEvaluator("train", metrics, self._targets)
        if self._evaluator.needs_losses:
            raise ConfigError("LOG.TRAIN_METRICS: the losses of the model are logged anyway; leave out Loss")

    @torch.no_grad()
    def after_step(self) -> None:
        trainer: Any = self.trainer
        self._evaluator.reset()
        self._evaluator.process(trainer.batch, gathered(trainer.adapter.predictions(trainer.outputs, training=True)))
        values = flatten_names(self._evaluator.evaluate(local=True))
        if trainer.ranks_in_sync:
            trainer.storage.average_over_ranks(values)
        trainer.storage.put_scalars(**values)

    def _targets(self, batch: Any) -> Any:
        trainer: Any = self.trainer
        return trainer.adapter.targets(batch, training=True)


def training_metrics(cfg: CfgNode) -> TrainingMetrics | None:
    """Build the hook of ``cfg.LOG.TRAIN_METRICS``; None if there are none."""
    return TrainingMetrics(build_metrics(cfg, TRAIN_METRICS_SLOT)) if cfg.LOG.TRAIN_METRICS else None
