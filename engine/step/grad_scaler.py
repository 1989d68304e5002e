"""Steps with a gradient scaler (float16), for one optimizer or several."""

from typing import Any

import torch

from ...hooks.common.models import optimizers_of
from .finite import start_momentum

__all__ = ["scaled_step", "unscale"]


def unscale(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """Divide the gradients by the scale, before they are clipped or read."""
    for one in _with_gradients(optimizer):
        scaler.unscale_(one)


def scaled_step(scaler: torch.amp.GradScaler, optimizer: Any) -> list[torch.Tensor]:
    """Update the weights and the scale; the scaler skips the update if a gradient is NaN or infinite.

    Returns:
        The scaler's flags, 1 where it found a NaN or an infinity.
    """
    optimizers = _with_gradients(optimizer)
    for one in optimizers:
        if not one.state:
            start_momentum(one)
        scaler.step(one)
    if not optimizers:
        return []
    flags = [flag for one in optimizers for flag in scaler._found_inf_per_device(one).values()]
    scaler.update()
    return flags


def _with_gradients(optimizer: Any) -> list[Any]:
    """Return the optimizers that have a gradient: scalers refuse the others."""
    return [
        one
        for one in optimizers_of(optimizer)
        if any(p.grad is not None for group in one.param_groups for p in group["params"])
    ]
