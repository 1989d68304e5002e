"""How many terms a loss of torch is the mean of."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["count_of_mean", "terms_ahead", "value_and_terms"]


def value_and_terms(loss: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Call a loss, and return its value and the number of terms that this is the mean of.

    The number is known for a value that a function of ``torch.nn.functional`` has returned, in the loss or in whatever
    it calls. It is a scalar tensor; "sum" if the value is a sum; None if it is not known, so that the value counts as
    the mean over samples.
    """
    with _Terms() as terms:
        value = loss(*args, **kwargs)
    known = next((count for result, count in terms.noted if result is value), None)
    return value, "sum" if known is None and getattr(loss, "reduction", "") == "sum" else known


def terms_ahead(loss: Any, target: Any) -> Any:
    """Return the number of terms that a loss of torch will be the mean of, if the target alone tells it; else None."""
    if type(loss) not in (nn.CrossEntropyLoss, nn.NLLLoss) or loss.reduction != "mean":
        return None
    return count_of_mean(F.cross_entropy, {"target": target, "weight": loss.weight, "ignore_index": loss.ignore_index})


class _Terms(TorchFunctionMode):
    """Notes of each loss of ``torch.nn.functional`` that is computed what it returned, and of how many terms.

    A mean over labels is computed such that it is 0, not NaN, without any that counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[torch.Tensor, torch.Tensor | str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        settings = _settings(func)
        if settings is None:
            return func(*args, **kwargs)
        given = settings.bind(*args, **kwargs)
        given.apply_defaults()
        wanted = given.arguments
        if wanted.get("size_average") is not None or wanted.get("reduce") is not None:
            wanted["reduction"] = nn._reduction.legacy_get_string(wanted["size_average"], wanted["reduce"], False)
            wanted["size_average"] = wanted["reduce"] = None
        count = count_of_mean(func, wanted) if wanted["reduction"] == "mean" else None
        if count is not None and "ignore_index" in wanted:
            wanted["reduction"] = "sum"
            total = func(*given.args, **given.kwargs)
            result = total / torch.where(count > 0, count, 1).to(total.dtype)
        else:
            result = func(*given.args, **given.kwargs)
        if wanted["reduction"] == "sum" and count is None:
            self.noted.append((result, "sum"))
        elif count is not None:
            self.noted.append((result, count))
        return result


@cache
def _settings(func: Any) -> inspect.Signature | None:
    """Return the signature of a loss of ``torch.nn.functional``; None for another function."""
    if getattr(func, "__module__", "") != "torch.nn.functional":
        return None
    signature = inspect.signature(func)
    return signature if "reduction" in signature.parameters and "input" in signature.parameters else None


_OVER_ELEMENTS = (
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.huber_loss, F.kl_div, F.l1_loss, F.mse_loss),
    *(F.gaussian_nll_loss, F.poisson_nll_loss, F.smooth_l1_loss, F.soft_margin_loss),
)


def count_of_mean(func: Any, given: Mapping[str, Any]) -> Any:
    """Return the divisor (a scalar) of a loss's mean; None if it is the number of samples.

    It is the number of targets that count, the sum of their classes' weights, or the number of elements.
    """
    target: Any = given.get("target")
    weight: Any = given.get("weight")
    if func in _OVER_ELEMENTS:
        if func in (F.l1_loss, F.mse_loss) and weight is not None:
            return weight.sum(dtype=torch.promote_types(weight.dtype, torch.float32))
        size = torch.broadcast_shapes(given["input"].shape, target.shape).numel()
        return torch.full((), size, device=given["input"].device)
    if "ignore_index" not in given:
        return None
    if target.is_floating_point():  # probabilities of classes: weights do not divide
        classes = target.shape[min(1, target.dim() - 1)]
        return torch.full((), target.numel() // classes, device=target.device)
    counted = target != (-100 if given["ignore_index"] is None else given["ignore_index"])
    if weight is None:
        return counted.sum()
    weights = weight[torch.where(counted, target, 0)] * counted
    return weights.sum(dtype=torch.promote_types(weight.dtype, torch.float32))
