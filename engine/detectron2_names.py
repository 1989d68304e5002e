"""Names of ``detectron2.engine`` that only code written for it needs."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..config.values import MISSING
from ..hooks import CommonMetricPrinter, EventWriter, JSONWriter, TensorboardXWriter
from .simple_trainer import SimpleTrainer


class AMPTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` in mixed precision, with detectron2's arguments.

    Args:
        grad_scaler: the gradient scaler; by default one is created if ``precision`` is float16.
        precision: dtype of the forward pass.
        log_grad_scaler: put the scale into the storage, as ``[metric]grad_scaler``.
        **kwargs: other arguments of :class:`SimpleTrainer`.
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
        kwargs |= {"grad_scaler": grad_scaler, "precision": precision, "async_write_metrics": async_write_metrics}
        super().__init__(model, data_loader, optimizer, gather_metric_period, zero_grad_before_forward, **kwargs)
        self.log_grad_scaler = log_grad_scaler

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self.log_grad_scaler and self.grad_scaler is not None:
            scale = self.grad_scaler._scale
            self.storage.put_scalar("[metric]grad_scaler", 1.0 if scale is None else scale, smoothing_hint=False)


def default_writers(output_dir: str, max_iter: int | None = None) -> Sequence[EventWriter]:
    """Return writers for the console, ``metrics.json`` and TensorBoard.

    Args:
        output_dir: folder of the files.
        max_iter: the total number of iterations, for the ETA.
    """
    return [
        CommonMetricPrinter(max_iter),
        JSONWriter(os.path.join(output_dir, "metrics.json")),
        TensorboardXWriter(output_dir=output_dir),
    ]


def _highlight(code: str, filename: str) -> str:
    """Return YAML or Python code for a terminal: unchanged, since hookline does not color it."""
    return code


def _try_get_key(cfg: object, *keys: str, default: object = None) -> Any:
    """Return the value of the first of some full keys, such as ``"train.seed"``, that a config of any kind has."""
    for key in keys:
        value = cfg
        for part in key.split("."):
            value = value[part] if isinstance(value, Mapping) and part in value else MISSING
        if value is not MISSING:
            return value
    return default
