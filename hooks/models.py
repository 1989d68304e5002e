"""What hooks, and the engine, do with a model whatever it is."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

__all__ = ["random_numbers_left_alone", "unwrap_model"]


def unwrap_model(model: Any) -> Any:
    """The user's model inside of DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


@contextmanager
def random_numbers_left_alone(model: nn.Module) -> Iterator[None]:
    """Whatever is drawn inside, of python's, numpy's or torch's random numbers, draws go on as if it had not been.

    Args:
        model: on the devices whose generators count.
    """
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
