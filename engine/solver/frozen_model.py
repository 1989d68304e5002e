"""Models without trainable parameters, which can only be evaluated."""

import torch
from torch.optim import Optimizer

from ...config import ConfigError

__all__ = ["NothingToTrainError", "empty_optimizer"]


class NothingToTrainError(ConfigError):
    """The model has no parameter that requires a gradient."""


def empty_optimizer() -> Optimizer:
    """Return the optimizer of a model that is only evaluated: one without parameters."""
    return torch.optim.SGD([{"params": []}], lr=0.0)
