"""Reads losses and named parts from what a model returns."""

from collections.abc import Container, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ...config.errors import MismatchError
from .inputs import describe

__all__ = ["entries_of", "losses_of", "predictions_of", "terms_of", "without_loss", "without_scalar"]


def entries_of(output: Any) -> Mapping[Any, Any] | None:
    """Return an output's parts by name; None if they have no names."""
    if isinstance(output, Mapping):
        return output
    if is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        return output._asdict()
    return None


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a tensor without dimensions."""
    return isinstance(value, Tensor) and not value.dim()


def losses_of(output: Any) -> dict[str, Any]:
    """Return the losses in the output of a model without ``MODEL.LOSS``."""
    count: Any = None
    losses: dict[str, Any] = {}
    if isinstance(output, Tensor):
        losses = {} if output.dim() else {"total_loss": output}
    elif type(output) is tuple:  # (logits, loss)
        scalars = [part for part in output if _is_scalar(part) or isinstance(part, int | float)]
        losses = {"loss": scalars[0]} if len(scalars) == 1 and _is_scalar(scalars[0]) else {}
    elif type(output) is not dict and _is_scalar(loss := getattr(output, "loss", None)):
        losses, count = {"loss": loss}, getattr(output, "num_items", None)
    elif type(output) is dict or isinstance(output, Mapping):
        losses = output if type(output) is dict else dict(output)
        if "num_items" in losses:
            losses = dict(losses)
            count = losses.pop("num_items")
        for value in losses.values():
            if not isinstance(value, Tensor) or value.dim():  # not only losses: {"loss": ..., "logits": ...}
                losses = {"loss": output["loss"]} if _is_scalar(output.get("loss")) else {}
                break
    if losses:
        return losses if count is None else _with_count(losses, count)
    raise MismatchError(
        "without MODEL.LOSS the model must return its losses in training mode: a dict of scalar tensors, one scalar "
        "tensor, a tuple with one, an object whose .loss is one, or a dict with one named 'loss'. It returned "
        f"{describe(output)}. If these are predictions, set MODEL.LOSS.NAME"
    )


def terms_of(loss: Any) -> dict[str, Any]:
    """Return what ``MODEL.LOSS`` returned as losses by name, with ``num_items`` if it counts its items."""
    if isinstance(loss, Tensor) and not loss.dim():
        return {"loss": loss}
    if isinstance(loss, tuple) and len(loss) == 2 and _is_scalar(loss[0]):
        return _with_count({"loss": loss[0]}, loss[1])
    if isinstance(loss, Mapping) and loss:
        terms = dict(loss)
        count = terms.pop("num_items", None)
        if terms and all(map(_is_scalar, terms.values())):
            return terms if count is None else _with_count(terms, count)
    raise MismatchError(
        "MODEL.LOSS must return a scalar tensor, that and the number of items of its mean, or scalar tensors by name, "
        f"not {describe(loss)}; use reduction='mean'"
    )


def without_scalar(output: Any) -> Any:
    """Return a tuple such as (logits, loss) without scalars and None, or the only other part; others unchanged."""
    if type(output) is not tuple:
        return output
    rest = tuple(part for part in output if part is not None and not _is_scalar(part))
    return rest[0] if len(rest) == 1 < len(output) else rest or output


def without_loss(output: Any) -> Any:
    """Return the named parts of an output as a dict without ``loss``, if that is a scalar or None; others unchanged."""
    entries = entries_of(output)
    if entries is None or not ("loss" in entries or hasattr(output, "loss")):
        return output
    loss = entries.get("loss")
    if loss is not None and not _is_scalar(loss):  # a loss for each sample
        return output
    return {name: value for name, value in entries.items() if name != "loss" and value is not None} or output


def predictions_of(output: Any, ignore: Container[str] = ()) -> Any:
    """Return what metrics and callers receive of an output: its parts without the loss, or the only part by itself.

    Args:
        output: a model's output.
        ignore: names of further parts to leave out.
    """
    rest = without_loss(output)
    if ignore and (entries := entries_of(rest)) is not None:
        rest = {name: value for name, value in entries.items() if name not in ignore}
    return next(iter(rest.values())) if rest is not output and len(rest) == 1 else rest


def _with_count(losses: dict[str, Any], count: Any) -> dict[str, Any]:
    """Add the number of items that the losses are means of, as ``num_items``."""
    if not (isinstance(count, int) or _is_scalar(count)):
        raise MismatchError(f"num_items must be an int or a scalar tensor, not {describe(count)}")
    return {**losses, "num_items": count}
