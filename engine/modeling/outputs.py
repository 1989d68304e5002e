"""Losses and named parts of what a model or loss returns, and clear errors where they do not fit together."""

import re
from collections.abc import Container, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ...config import ConfigError
from ...config.errors import MismatchError
from ...hooks.common.tensors import local_part

__all__ = [
    "check_output",
    "describe",
    "entries_of",
    "losses_of",
    "predictions_of",
    "raise_clearer",
    "terms_of",
    "without_loss",
    "without_scalars",
]


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
        losses = {"total_loss": output}
    elif type(output) is tuple:  # (logits, loss)
        scalars = [part for part in output if _is_scalar(part) or isinstance(part, int | float)]
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


def terms_of(loss: Any) -> dict[str, Any]:
    """Return what ``MODEL.LOSS`` returned as losses by name, with ``num_items`` if it counts its items."""
    if type(loss) is Tensor and not loss.dim():
        return {"loss": loss}
    value, count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    terms = dict(value) if isinstance(value, Mapping) else {"loss": value}
    count = terms.pop("num_items", count)
    if terms and all(map(_is_scalar, terms.values())):
        # The loss of scores that are split over ranks is a whole number on each of them.
        return _with_count({name: local_part(term) for name, term in terms.items()}, local_part(count))
    raise MismatchError(
        "MODEL.LOSS must return a scalar tensor, that and the number of items of its mean, or scalar tensors by name, "
        f"not {describe(loss)}; use reduction='mean'"
    )


def _with_count(losses: dict[str, Any], count: Any) -> dict[str, Any]:
    """Add the number of items that the losses are means of, as ``num_items``."""
    if count is None:
        return losses
    if not (isinstance(count, int) or _is_scalar(count)):
        raise MismatchError(f"num_items must be an int or a scalar tensor, not {describe(count)}")
    return {**losses, "num_items": count}


def without_scalars(output: Any) -> Any:
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


def check_output(output: Any) -> None:
    """Raise MismatchError if a model returned nothing."""
    if output is None:
        raise MismatchError("the model returned None: its forward() has no return statement, or an empty one")


def raise_clearer(error: Exception, batch: Any = None, clear: Exception | None = None) -> None:
    """Raise a clearer error for one of a model, its loss or its backward pass. Without one, add a note and return.

    Args:
        error: the error.
        batch: what the model was called with, for the note; None: there is no note.
        clear: the clearer error, if it is known already.
    """
    message = str(error)
    if match := re.fullmatch(r"Target (-?\d+) is out of bounds\.", message):
        clear = MismatchError(
            f"the target {match[1]} is not a class: the model's output has fewer classes (its num_classes, or the size "
            "of its last layer), or the labels do not count from 0"
        )
    elif message.startswith("Expected target size"):
        clear = MismatchError(
            f"torch's loss takes scores (N, classes, ...) for targets (N, ...): {message}. For scores (N, ..., "
            'classes) name the loss: MODEL.LOSS.NAME "CrossEntropyLoss" (Trainer: loss="CrossEntropyLoss")'
        )
    elif "does not require grad and does not have a grad_fn" in message:
        clear = MismatchError(
            "the loss does not depend on the model's parameters: an output or the loss was detached (by detach(), "
            "no_grad(), item() or numpy()), or the parameters in use do not require a gradient"
        )
    if clear is not None:
        raise clear from error
    if batch is None or isinstance(error, ConfigError):
        return
    if not any(note.endswith(" as batch") for note in getattr(error, "__notes__", ())):
        error.add_note(f"with {describe(batch)} as batch")


def describe(value: Any) -> str:
    """Describe a value's type and shapes for error messages."""
    return f"a {_described(value, 0)}"


def _described(value: Any, depth: int) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    if isinstance(value, Mapping) and depth < 3:
        parts = ", ".join(f"{name}: {_described(part, depth + 1)}" for name, part in value.items())
        return f"{type(value).__name__} {{{parts}}}"
    if isinstance(value, tuple | list) and depth < 3 and len(value) <= 8:
        return f"{type(value).__name__} ({', '.join(_described(part, depth + 1) for part in value)})"
    return type(value).__name__
