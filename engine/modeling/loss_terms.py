"""How many terms a loss of torch is the mean of."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...hooks.common import local_part

__all__ = ["Terms", "count_of_mean", "terms_ahead"]

# Methods and functions that leave a loss the mean of the same terms, if its other arguments are not tensors.
_KEEP_TERMS = frozenset({"mul", "div", "neg", "float", "to"})


def terms_ahead(loss: Any, target: Any) -> Any:
    """Return the number of terms that a loss of torch will be the mean of, if the target alone tells it; else None."""
    if type(loss) not in (nn.CrossEntropyLoss, nn.NLLLoss) or loss.reduction != "mean":
        return None
    return count_of_mean(F.cross_entropy, {"target": target, "weight": loss.weight, "ignore_index": loss.ignore_index})


class Terms(TorchFunctionMode):
    """Within it, each loss of ``torch.nn.functional`` is noted, with the number of terms that it is the mean of.

    A mean over labels is computed such that it is 0, not NaN, without any that counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[torch.Tensor, torch.Tensor | str]] = []

    def added_to(self, losses: dict[str, Any], value: Any = None, function: Any = None) -> dict[str, Any]:
        """Return losses with ``num_terms``, the number of terms that they are the mean of, if it is known.

        It is a scalar tensor, or "sum" for a sum. It is not known if there are several losses, or if no function of
        torch returned the only one (perhaps times a Python number), or one in a graph of ``torch.compile`` did.

        Args:
            losses: by name.
            value: what ``function`` returned, if the losses were read from it: a tensor, or losses by name.
            function: a loss whose attribute ``reduction`` may be "sum".
        """
        value = losses if value is None else value
        if isinstance(value, Mapping):
            value = next(iter(value.values())) if len(value) == 1 else None
        count = self._count_of(value)
        if count is None and getattr(function, "reduction", "") == "sum":
            count = "sum"
        return losses if count is None else {**losses, "num_terms": local_part(count)}

    def _count_of(self, value: Any) -> Any:
        return next((count for result, count in self._noted if result is value), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # notes would break the graph
            return func(*args, **kwargs)
        settings = _settings(func)
        if settings is None:
            result = func(*args, **kwargs)
            if self._noted and getattr(func, "__name__", "") in _KEEP_TERMS:
                tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
                count = self._count_of(tensors[0]) if len(tensors) == 1 else None
                if count is not None and count != "sum":  # the number may be that of its terms
                    self._noted.append((result, count))
            return result
        given = settings.bind(*args, **kwargs)
        given.apply_defaults()
        wanted = given.arguments
        if wanted.get("size_average") is not None or wanted.get("reduce") is not None:
            wanted["reduction"] = nn._reduction.legacy_get_string(wanted["size_average"], wanted["reduce"], False)
            wanted["size_average"] = wanted["reduce"] = None
        count = count_of_mean(func, wanted) if wanted["reduction"] == "mean" else None
        # Not in a checkpointed part, which is computed once more without this mode, and has to save the same tensors.
        checkpointed = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if count is not None and "ignore_index" in wanted and not checkpointed:
            wanted["reduction"] = "sum"
            total = func(*given.args, **given.kwargs)
            result = total / torch.where(count > 0, count, 1).to(total.dtype)
        else:
            result = func(*given.args, **given.kwargs)
        if wanted["reduction"] == "sum" and count is None:
            self._noted.append((result, "sum"))
        elif count is not None:
            self._noted.append((result, count))
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
