"""Models without trainable parameters, which can only be evaluated."""

from collections.abc import Callable
from typing import Any

import torch

from ...config import ConfigError

__all__ = ["NothingToTrainError", "optimizer_or_problem"]


class NothingToTrainError(ConfigError):
    """The model has no parameter that requires a gradient."""


def optimizer_or_problem(build: Callable[[], Any]) -> tuple[Any, str]:
    """Return the optimizer that ``build`` returns; and if all parameters are frozen an empty one, and an error text.

    A model that is only evaluated may have frozen parameters only.
    """
    try:
        return build(), ""
    except NothingToTrainError as error:
        return torch.optim.SGD([{"params": []}], lr=0.0), f"{error}, and there is training data"
