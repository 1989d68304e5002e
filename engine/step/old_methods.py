"""Methods that trainers written for detectron2 override in their own way."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any

import torch

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
        own = vars(cls).get(event)
        if inspect.isfunction(own) and not _calls_base(own, cls):
            setattr(cls, event, _with_base(own, cls))


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


def _calls_base(own: FunctionType, cls: type) -> bool:
    """Whether the code of a method has ``super()``, or names a class that ``cls`` inherits from."""
    names = {"super", *(parent.__name__ for parent in cls.__mro__)}
    return "__class__" in own.__code__.co_freevars or not names.isdisjoint(own.__code__.co_names)


def _with_base(own: FunctionType, cls: type) -> Callable[[Any], None]:
    event = own.__name__

    @wraps(own)
    def before_step(self: Any) -> None:
        if self._joined or self._left:
            self._change_hooks()
        _call_base(self, cls, event)
        own(self)

    @wraps(own)
    def after_step(self: Any) -> None:
        own(self)
        if self._finished != self.iter:
            _call_base(self, cls, event)

    @wraps(own)
    def after_train(self: Any) -> None:
        try:
            own(self)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            if self._running:
                _call_base(self, cls, event)

    return {"before_step": before_step, "after_step": after_step, "after_train": after_train}[event]


def _call_base(trainer: Any, cls: type, event: str) -> None:
    """Call the method that ``cls`` overrides, which then calls no hook of the trainer's list."""
    table = trainer._listeners
    listeners, hooks = table[event], {id(hook) for hook in trainer._hooks}
    table[event] = tuple(listener for listener in listeners if id(listener[2]) not in hooks)
    try:
        getattr(super(cls, trainer), event)()
    finally:
        table[event] = listeners
