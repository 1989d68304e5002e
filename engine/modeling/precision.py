"""The precision of evaluation and prediction: ``TEST.PRECISION``."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ...hooks.common.tensors import convert

__all__ = ["eval_autocast", "in_precision"]


def eval_autocast(model: Any, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return ``torch.autocast`` in ``dtype`` for the model's device; with None a context that changes nothing."""
    if dtype is None:
        return nullcontext()
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.autocast("cpu" if parameter is None else parameter.device.type, dtype=dtype)


def in_precision(run: Callable[[Any], Any], model: Any, dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return ``run`` under autocast, with outputs of ``dtype`` converted to float32 for metrics and files."""

    def to_float32(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.float() if value.dtype is dtype else value
        return None

    def run_in_precision(batch: Any) -> Any:
        with eval_autocast(model, dtype):
            return convert(run(batch), to_float32)

    return run_in_precision
