"""Methods that trainers written for detectron2 override in their own way."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any

import torch

from ...hooks.base import StopTraining
from ...hooks.common.overriding import calls_base

__all__ = ["adapt_old_methods", "split_data_time"]


def adapt_old_methods(cls: Any, base: type) -> None:
    """Have a trainer work with methods of the class that detectron2's trainers, or early ones, may have.

    - ``_write_metrics(metrics_dict)`` gets one dict, with the losses and ``data_time``.
    - ``_detect_anomaly(losses, loss_dict)`` is called with the sum of the losses, before the backward pass.
    - ``before_step``, ``after_step`` and ``after_train`` that call the hooks themselves, without ``super()``: what
      these methods of ``base`` do besides, such as saving, is done too.

    Args:
        cls: a subclass of ``base``.
        base: the class of all trainers with a model.
    """
    write = cls._write_metrics
    if len(inspect.signature(write).parameters) == 2:  # self and the dict
        cls._write_metrics = _with_data_time(write)
    inherited = any(hasattr(parent, "_detect_anomaly") for parent in cls.__bases__ if issubclass(parent, base))
    if hasattr(cls, "_detect_anomaly") and not inherited:
        cls.forward = _with_anomaly_check(cls.forward)
    for event in ("before_step", "after_step", "after_train"):
        owner, *others = [parent for parent in cls.__mro__ if event in vars(parent)]
        own = vars(owner)[event]
        # Trainers that cls inherits from are adapted already; mixins are not.
        is_new = owner is cls or not _is_trainer(owner, base)
        if is_new and inspect.isfunction(own) and not calls_base(own, owner, cls):
            methods = [vars(parent)[event] for parent in others if _is_trainer(parent, base)]
            # Those that call the hooks too are left out.
            method = next(method for method in methods if not hasattr(method, "calls_hooks"))
            setattr(cls, event, _wrapped(event, own, method))


def _is_trainer(cls: type, base: type) -> bool:
    return issubclass(cls, base) or issubclass(base, cls)


def split_data_time(metrics: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], float]:
    """Return the metrics of an early ``_write_metrics``, as tensors on one device, and their ``data_time``."""
    device = next((value.device for value in metrics.values() if isinstance(value, torch.Tensor)), None)
    tensors = {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(float(value), device=device)
        for name, value in metrics.items()
        if name != "data_time"
    }
    return tensors, float(metrics.get("data_time", 0.0))


def _with_data_time(write: Callable[..., None]) -> Callable[..., None]:
    @wraps(write)
    def _write_metrics(self: Any, loss_dict: Mapping[str, Any], data_time: float | None = None) -> None:
        write(self, dict(loss_dict) if data_time is None else {**loss_dict, "data_time": data_time})

    return _write_metrics


def _with_anomaly_check(original: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
    @wraps(original)
    def forward(self: Any, batch: Any) -> dict[str, torch.Tensor]:
        loss_dict = original(self, batch)
        losses = {name: loss for name, loss in loss_dict.items() if name != "num_items"}
        self._detect_anomaly(sum(losses.values()), losses)
        return loss_dict

    return forward


def _wrapped(event: str, own: FunctionType, method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a trainer's method for ``event`` that calls ``own``, and does what ``method`` does besides."""

    @wraps(own)
    def before_step(self: Any) -> None:
        if self._step_begun:  # called by the before_step of a subclass
            own(self)
            return
        self._begin_step()
        self._step_begun = True
        try:
            own(self)
        finally:
            self._step_begun = False

    @wraps(own)
    def after_step(self: Any) -> None:
        try:
            own(self)
        except StopTraining as stop:
            self.request_stop(str(stop))
        if self._finished != self.iter:
            _call_without_hooks(self, method)

    @wraps(own)
    def after_train(self: Any) -> None:
        try:
            own(self)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            if self._running:
                _call_without_hooks(self, method)

    wrapped: Any = {"before_step": before_step, "after_step": after_step, "after_train": after_train}[event]
    wrapped.calls_hooks = True
    return wrapped


def _call_without_hooks(trainer: Any, method: Callable[[Any], None]) -> None:
    """Call a method for an event, which then calls no hook of the trainer's list."""
    event, table = method.__name__, trainer._listeners
    listeners, hooks = table[event], {id(hook) for hook in trainer._hooks}
    table[event] = tuple(listener for listener in listeners if id(listener[2]) not in hooks)
    try:
        method(trainer)
    finally:
        table[event] = listeners
