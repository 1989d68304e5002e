"""Try steps of a trainer and undo them."""

import copy
import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...config import ConfigError
from ...hooks.common.models import unwrap_model
from ...hooks.common.rng import capture_rng, restore_rng
from ..data.epoch_iterator import EpochIterator
from ..simple_trainer import SimpleTrainer
from ..step.fused_step import FusedStep
from ..step.nonfinite import NonFinitePolicy
from ..step.random_state import RandomState
from ..step.step_outputs import StepOutputs
from ..train_loop import TrainerBase

__all__ = ["probing"]

logger = logging.getLogger(__name__)


@contextmanager
def probing(trainer: Any, data_loader: Iterable[Any] | None = None) -> Iterator[Any]:
    """Yield a copy of a trainer to try steps with. At the end, everything that they changed is undone.

    The copy has the trainer's model, optimizer and data, but no hooks, and its own storage: nothing is logged, written
    or saved. Afterwards weights, buffers, gradients, the optimizer's state, the loss scale, the position in the data
    and all random generators are as before.

    Args:
        trainer: a SimpleTrainer or DefaultTrainer that is not training.
        data_loader: other data. Default: the trainer's.

    Raises:
        ConfigError: the trainer has a loop or a step of its own.
    """
    own_step = isinstance(trainer, SimpleTrainer) and getattr(trainer.run_step, "__self__", trainer) is not trainer
    if not isinstance(trainer, SimpleTrainer) or own_step or trainer._running:
        raise ConfigError(
            f"{type(trainer).__name__} cannot be tried: it must be a SimpleTrainer or DefaultTrainer that is not "
            "training and has no step of its own"
        )
    rng, batches = capture_rng(), trainer._batches
    position = batches.state_dict() if batches.begun else None
    restore = [_keep_model(trainer.model), _keep_optimizer(trainer.optimizer)]
    probe: Any = copy.copy(trainer)
    TrainerBase.__init__(probe)  # without hooks, requests and results of earlier runs
    probe._random_state, probe._step_outputs = RandomState(), StepOutputs(probe)
    probe.data_loader = trainer.data_loader if data_loader is None else data_loader
    length = trainer._given_length if data_loader is None else None
    probe._batches = EpochIterator(probe.data_loader, length, weakref.proxy(probe), trainer.device)
    probe.nonfinite = NonFinitePolicy("stop" if trainer._device_type() == "cpu" else "raise")
    probe.gather_metric_period = 1
    if isinstance(probe._whole_step, FusedStep):
        probe._whole_step = None
    if trainer.grad_scaler is not None:
        probe.grad_scaler = torch.amp.GradScaler(trainer._device_type())
        probe.grad_scaler.load_state_dict(trainer.grad_scaler.state_dict())
    loop = logging.getLogger(f"{__package__.rpartition('.')[0]}.train_loop")
    disabled, loop.disabled = loop.disabled, True
    try:
        yield probe
    finally:
        loop.disabled = disabled
        del probe
        for undo in restore:
            undo()
        if position is not None and not batches.load_state_dict(position):
            logger.warning("The data loader cannot return to its position: epoch %d starts over", batches.epoch)
        restore_rng(rng)


def _keep_model(model: torch.nn.Module) -> Any:
    modules = list(unwrap_model(model).modules())
    modes = [(module, module.training) for module in modules]
    buffers = [(module._buffers, dict(module._buffers)) for module in modules]
    tensors: list[torch.Tensor] = list(model.parameters())
    tensors += [buffer for _, own in buffers for buffer in own.values() if buffer is not None]
    kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None

    def undo() -> None:
        for owner, own in buffers:
            owner.update(own)
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training

    return undo


def _keep_optimizer(optimizer: Any) -> Any:
    state = copy.deepcopy(optimizer.state_dict())
    return lambda: optimizer.load_state_dict(state)
