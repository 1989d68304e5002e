"""Models without trainable parameters, which can only be evaluated."""

from collections.abc import Callable
from typing import Any

import torch

from ...config import ConfigError

__all__ = ["NothingToTrainError", "build_optimizer_unless_frozen"]


class NothingToTrainError(ConfigError):
    """The model has no parameter that requires a gradient."""


def build_optimizer_unless_frozen(build: Callable[[], Any], trains: bool) -> Any:
    """Return the optimizer that ``build`` returns. A model that is only evaluated may have frozen parameters only.

    Raises:
        ConfigError: all parameters are frozen, and there is training data.
    """
    try:
        return build()
    except NothingToTrainError as error:
        if trains:
            raise ConfigError(f"{error}, and there is training data") from None
        return torch.optim.SGD([{"params": []}], lr=0.0)
