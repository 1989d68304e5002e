"""Statistics of tensors, for reports."""

from collections.abc import Sequence
from typing import Any

import torch

from ...hooks.common.tensors import local_part

__all__ = ["statistics"]


def statistics(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return shape, min, max, mean and norm of the finite values, the share of zeros, and the numbers of NaN and
    infinities.

    Args:
        tensors: their values count together, the shape is the first one's.
    """
    parts = [local_part(tensor.detach()).double().flatten() for tensor in tensors]
    values = parts[0] if len(parts) == 1 else torch.cat(parts)
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    finite = values[values.isfinite()] if nan or inf else values
    empty = not finite.numel()
    return {
        "shape": list(tensors[0].shape),
        "min": None if empty else float(finite.min()),
        "max": None if empty else float(finite.max()),
        "mean": None if empty else float(finite.mean()),
        "norm": None if empty else float(finite.norm()),
        "zeros": float((finite == 0).double().mean()) if not empty else None,
        "nan": nan,
        "inf": inf,
    }
