"""What the modules of this room use of a trainer."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ...hooks.event_storage import EventStorage
from ...hooks.hook_list import HookList
from ..data.epoch_iterator import EpochIterator
from ..modeling.adapters import ModelAdapter
from ..modeling.loss_module import LossModule
from ..parallel.base import Strategy


class StepTrainer(Protocol):
    """A :class:`~hookline.engine.SimpleTrainer`, for type checkers; its names are explained there."""

    iter: int
    finished_iter: int
    hooks: HookList
    model: nn.Module
    adapter: ModelAdapter
    optimizer: Any
    strategy: Strategy
    loss_module: LossModule | None
    grad_scaler: torch.amp.GradScaler | None
    accumulation_steps: int
    gather_metric_period: int
    zero_grad_before_forward: bool
    batches: EpochIterator
    storage: EventStorage
    nonfinite: Any
    write_metrics: Any

    @property
    def averaging_ranks(self) -> int: ...
    @property
    def device_type(self) -> str: ...

    def forward_backward(self, batch: Any, weights: Any = None, share: float = 1.0) -> dict[str, torch.Tensor]: ...
    def record_losses(self, loss_dict: Mapping[str, torch.Tensor], data_time: float, prefix: str = "") -> None: ...
    def optimizer_step(self) -> None: ...
    def zero_grad(self) -> None: ...
    def stop(self, reason: str, exit_code: int = 0) -> None: ...
    def request_stop(self, reason: str = "", exit_code: int = 0) -> None: ...
    def replay_command(self, iteration: int) -> str: ...
    def _detect_anomaly(self, losses: torch.Tensor, loss_dict: Any) -> None: ...
