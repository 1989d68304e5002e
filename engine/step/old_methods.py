"""Methods that trainers written for detectron2, or for early versions of it, override in their own way."""

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import wraps
from typing import Any

import torch

__all__ = ["ThisThread", "adapt_old_methods", "split_data_time"]


class ThisThread(Executor):
    """``concurrent_executor`` of a trainer: calls at once what is submitted, since no metric waits for the device."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def adapt_old_methods(cls: Any) -> None:
    """Have a trainer's step work with methods that the class defines as detectron2's trainers may.

    - ``_write_metrics(metrics_dict)`` gets one dict, with the losses and ``data_time``.
    - ``_detect_anomaly(losses, loss_dict)`` is called with the sum of the losses, before the backward pass.
    """
    write = cls._write_metrics
    if len(inspect.signature(write).parameters) == 2:  # self and the dict
        cls._write_metrics = _with_data_time(write)
    if hasattr(cls, "_detect_anomaly") and not any(hasattr(parent, "_detect_anomaly") for parent in _trainers(cls)):
        cls.forward = _with_anomaly_check(cls.forward)


def _trainers(cls: type) -> list[type]:
    """Return the base classes that are trainers. They are adapted already; mixins are not."""
    return [parent for parent in cls.__bases__ if hasattr(parent, "run_step")]


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
