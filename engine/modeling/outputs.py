"""What a model or a loss returns: losses, how many terms they are the mean of, and predictions."""

import inspect
from collections.abc import Callable, Container, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...config.errors import MismatchError
from ...hooks.common import fields_of, local_part
from .clear_errors import describe


def entries_of(output: object) -> Mapping[Any, Any] | None:
    """Return the entries of an output by name; None if they have no names."""
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        return output._asdict()
    return output if isinstance(output, Mapping) else fields_of(output) or None


def losses_of(output: object) -> dict[str, Tensor]:
    """Return the losses, scalar tensors () by name, in the output of a model without ``MODEL.LOSS``.

    Raises:
        MismatchError: there are none.
    """
    count: Any = None
    losses: dict[str, Any] = {}
    if isinstance(output, Tensor):
        losses = {"total_loss": output}
    elif type(output) is tuple:  # (logits, loss)
        scalars = [one for one in output if _is_scalar(one) or isinstance(one, int | float)]
        losses = {"loss": scalars[0]} if len(scalars) == 1 else {}
    elif type(output) is not dict and _is_scalar(loss := getattr(output, "loss", None)):
        losses, count = {"loss": loss}, getattr(output, "num_items", None)
    elif isinstance(output, Mapping):
        losses = dict(output)
        count = losses.pop("num_items", None)
        if not all(map(_is_scalar, losses.values())):  # not only losses: {"loss": ..., "logits": ...}
            losses = {"loss": losses.get("loss")}
    if losses and all(map(_is_scalar, losses.values())):
        return _with_count(losses, count)
    raise MismatchError(
        "without MODEL.LOSS the model must return its losses in training mode: a dict of scalar tensors, one scalar "
        "tensor, a tuple with one, an object whose .loss is one, or a dict with one named 'loss'. It returned "
        f"{describe(output)}. If these are predictions, set MODEL.LOSS.NAME"
    )


def terms_of(loss: Any) -> dict[str, Tensor]:
    """Return what ``MODEL.LOSS`` returned as scalar tensors () by name, with ``num_items`` if it counts its items.

    Raises:
        MismatchError: it is neither, or one of the terms seems to be the total of the others.
    """
    if type(loss) is Tensor and not loss.dim():
        return {"loss": loss}
    value, count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    terms = dict(value) if isinstance(value, Mapping) else {"loss": value}
    count = terms.pop("num_items", count)
    if problem := counted_twice(terms):
        raise MismatchError(f"MODEL.LOSS: {problem}")
    if terms and all(map(_is_scalar, terms.values())):
        return _with_count({name: _whole(term) for name, term in terms.items()}, local_part(count))
    raise MismatchError(
        "MODEL.LOSS must return a scalar tensor, that and the number of items of its mean, or scalar tensors by name, "
        f"not {describe(loss)}; use reduction='mean'"
    )


def counted_twice(losses: Mapping[str, Any]) -> str:
    """Return a warning if one of several losses seems to be the total of the others; otherwise nothing."""
    total = next((name for name in ("loss", "total_loss") if name in losses), "")
    others = ", ".join(name for name in losses if name not in (total, "num_items"))
    return (total and others) and (
        f"{total!r} is returned beside {others}, and training minimises the sum of all. If {total!r} is the total, "
        "return it alone, and log the others by get_event_storage().put_scalar(); if not, rename it"
    )


def _with_count(losses: dict[str, Any], count: Any) -> dict[str, Tensor]:
    """Add the number of items that the losses are means of, as ``num_items``."""
    if count is None:
        return losses
    if not (isinstance(count, int) or _is_scalar(count)):
        raise MismatchError(f"num_items must be an int or a scalar tensor, not {describe(count)}")
    return {**losses, "num_items": count}


def _whole(term: Tensor) -> Tensor:
    """Return a loss of scores that are split over ranks, which is whole on each of them, as a usual tensor."""
    whole = local_part(term)
    if whole is not term and hasattr(term, "num_terms"):
        whole.num_terms = local_part(term.num_terms)  # type: ignore[attr-defined]
    return whole


def _is_scalar(value: object) -> bool:
    """Return whether a value is a tensor without dimensions."""
    return isinstance(value, Tensor) and not value.dim()


# ---------------------------------------------------------------------- predictions


def without_scalars(output: object) -> Any:
    """Return a tuple such as (logits, loss) without scalars and None, or the only other entry; others unchanged."""
    if type(output) is not tuple:
        return output
    rest = tuple(one for one in output if one is not None and not _is_scalar(one))
    return rest[0] if len(rest) == 1 < len(output) else rest or output


def without_loss(output: object) -> Any:
    """Return an output with names as a dict without ``loss``, if that is a scalar or None; others unchanged."""
    entries = entries_of(output)
    if entries is None or not ("loss" in entries or hasattr(output, "loss")):
        return output
    loss = entries.get("loss")
    if loss is not None and not _is_scalar(loss):  # a loss for each sample
        return output
    return {name: value for name, value in entries.items() if name != "loss" and value is not None} or output


def without_cache(output: object, module: object) -> Any:
    """Return a named output without the cache of a Hugging Face model, as its Trainer does; others unchanged."""
    entries = entries_of(output)
    if entries is None:
        return output
    names = getattr(getattr(module, "config", None), "keys_to_ignore_at_inference", None) or ()
    kept = {name: v for name, v in entries.items() if name not in names and not type(v).__name__.endswith("Cache")}
    return output if len(kept) == len(entries) else type(output)(**kept)


def predictions_of(output: object, ignore: Container[str] = ()) -> Any:
    """Return what metrics and callers receive of an output: its entries without the loss, or the only one by itself.

    Args:
        output: a model's output.
        ignore: names of further entries to leave out.
    """
    if isinstance(output, Tensor):
        return output
    rest = without_loss(output)
    if ignore and (entries := entries_of(rest)) is not None:
        rest = {name: value for name, value in entries.items() if name not in ignore}
    return next(iter(rest.values())) if rest is not output and len(rest) == 1 else rest


# ---------------------------------------------------------------------- how many terms a loss is the mean of


# Methods and functions that leave a loss the mean of the same terms, if its other arguments are not tensors.
_KEEP_TERMS = frozenset({"mul", "div", "neg", "float", "to", "clone"})


def terms_ahead(loss: Any, target: Tensor) -> Any:
    """Return the number of terms that a loss of torch will be the mean of, if the target alone tells it; else None."""
    if type(loss) not in (nn.CrossEntropyLoss, nn.NLLLoss) or loss.reduction != "mean":
        return None
    return count_of_mean(F.cross_entropy, {"target": target, "weight": loss.weight, "ignore_index": loss.ignore_index})


class Terms(TorchFunctionMode):
    """Within it, a loss of ``torch.nn.functional`` gets an attribute ``num_terms``; see :func:`num_terms`.

    A mean over labels is computed such that it is 0, not NaN, without any that counts.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # an attribute would break the graph
            return func(*args, **kwargs)
        settings = _settings(func)
        if settings is None:
            result = func(*args, **kwargs)
            if getattr(func, "__name__", "") in _KEEP_TERMS:
                tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
                count = getattr(tensors[0], "num_terms", None) if len(tensors) == 1 else None
                if isinstance(count, Tensor):  # a sum may be divided by the number of its terms
                    result.num_terms = count
            return result
        given = settings.bind(*args, **kwargs)
        given.apply_defaults()
        wanted = given.arguments
        if wanted.get("size_average") is not None or wanted.get("reduce") is not None:
            wanted["reduction"] = nn._reduction.legacy_get_string(wanted["size_average"], wanted["reduce"], False)
            wanted["size_average"] = wanted["reduce"] = None
        reduction = wanted["reduction"]
        count = count_of_mean(func, wanted) if reduction == "mean" else "sum" if reduction == "sum" else None
        # Not in a checkpointed part, which is computed once more without this mode, and has to save the same tensors.
        # Before torch 2.8, which can ask for it, that is torch's error.
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        checkpointed = top is not None and top(True) is not None
        if isinstance(count, Tensor) and "ignore_index" in wanted and not checkpointed:
            wanted["reduction"] = "sum"
            total = func(*given.args, **given.kwargs)
            result = total / torch.where(count > 0, count, 1).to(total.dtype)
        else:
            result = func(*given.args, **given.kwargs)
        if count is not None:
            result.num_terms = count
        return result


def num_terms(losses: Mapping[str, Any] | Tensor, function: object = None) -> Any:
    """Return the number of terms that a loss is the mean of, a scalar tensor (); "sum" if it is a sum.

    None if it is not known: there are several losses, or the only one, which may be times a Python number, is not of a
    function of torch within :class:`Terms`, or is of one in a graph of ``torch.compile``.

    Args:
        losses: by name, or one alone.
        function: the loss; its attribute ``reduction`` may be "sum".
    """
    values = [losses] if isinstance(losses, Tensor) else list(losses.values())
    value = values[0] if len(values) == 1 else None
    count = getattr(value, "num_terms", None)
    return "sum" if count is None and getattr(function, "reduction", "") == "sum" else count


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
