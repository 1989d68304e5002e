"""Names of ``detectron2.utils.memory``."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["retry_if_cuda_oom"]

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])


def retry_if_cuda_oom(func: _F) -> _F:
    """Make a function that is called again if a GPU is out of memory: after emptying the cache, then on the CPU.

    Args:
        func: a function without side effects. For the last call, its tensor arguments are copied to the CPU; then it
            returns tensors on the CPU.
    """

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            logger.warning("%s: the GPU is out of memory; it runs on the CPU", getattr(func, "__name__", func))
        return func(*map(_to_cpu, args), **{name: _to_cpu(value) for name, value in kwargs.items()})

    return wrapped  # type: ignore[return-value]


def _to_cpu(value: Any) -> Any:
    return value.to("cpu") if getattr(getattr(value, "device", None), "type", "") == "cuda" else value
