"""Clear errors for models, losses and batches that do not fit together."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ...config import ConfigError
from ...config.errors import MismatchError
from ...config.signatures import what_it_takes
from .inputs import required_positions

__all__ = ["check_forward", "check_output", "check_own_step", "raise_clearer"]

# What other libraries call the step of a model.
_STEPS = ("training_step", "train_batch", "compute_loss")
_NOTE = "with a batch of "


def check_forward(model: nn.Module) -> None:
    """Check that a model has a ``forward``.

    Raises:
        MismatchError: it has none; the message says which key names a method of another library.
    """
    kind = type(model)
    if not issubclass(kind, nn.Module):  # such as a model whose optimizer is given
        return
    if kind.forward is not nn.Module.forward or kind.__call__ is not nn.Module.__call__:
        return
    if "forward" in vars(model):
        return
    step = next((name for name in _STEPS if callable(getattr(model, name, None))), "")
    hint = f"; to train by {step}(batch), set MODEL.TRAIN_STEP to it" if step else ""
    raise MismatchError(
        f"{type(model).__name__} has no forward(){hint}. Evaluation calls forward(), or the method that "
        "MODEL.PREDICT_STEP names"
    )


def check_own_step(step: Callable[..., Any], key: str) -> None:
    """Check that a model's own step takes the batch alone.

    Args:
        step: the method.
        key: the config key that names it.

    Raises:
        MismatchError: it needs more arguments.
    """
    taken = what_it_takes(step)
    if taken is not None and len(needed := required_positions(taken)) > 1:
        name = getattr(step, "__name__", "the step")
        raise MismatchError(
            f"{key}: {name}() needs {', '.join(needed)}, but it is called with the batch alone, as {name}(batch); give "
            f"a default to {', '.join(needed[1:])}"
        )


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
    if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_NOTE}{_shapes(batch)}")


def _shapes(value: Any, depth: int = 0) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping) and depth < 3:
        return f"{{{', '.join(f'{name}: {_shapes(part, depth + 1)}' for name, part in value.items())}}}"
    if isinstance(value, tuple | list) and depth < 3 and len(value) <= 8:
        return f"({', '.join(_shapes(part, depth + 1) for part in value)})"
    return type(value).__name__
