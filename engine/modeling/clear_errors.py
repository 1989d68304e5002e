"""Clearer texts for errors of models, losses and backward passes."""

import re
from collections.abc import Mapping

from torch import Tensor

from ...config import ConfigError
from ...config.errors import MismatchError
from ...hooks.common import fields_of

_CLEARER: tuple[tuple[str, type[Exception], str], ...] = (
    (
        r"^Target (-?\d+) is out of bounds\.$",
        MismatchError,
        "the target {0} is not a class: the model's output has fewer classes (its num_classes, or the size of its last "
        "layer), or the labels do not count from 0",
    ),
    (
        "does not require grad and does not have a grad_fn",
        MismatchError,
        "the loss does not depend on the model's parameters: an output or the loss was detached (by detach(), "
        "no_grad(), item() or numpy()), or the parameters in use do not require a gradient",
    ),
    (
        "got mixed torch.Tensor and DTensor",
        ConfigError,
        "PARALLEL.NAME: a parameter that is sharded over ranks was used outside of forward() of its unit, where it is "
        "not whole, as in a penalty on weights. Use SOLVER.WEIGHT_DECAY; or raise PARALLEL.ARGS.min_params, so that "
        "the module that uses it and its submodules are one unit; or set PARALLEL.NAME to ddp",
    ),
    (
        "(Expected to have finished reduction.*)",
        RuntimeError,
        "the losses of the previous step did not depend on all parameters: freeze the others (requires_grad_(False)), "
        "or set PARALLEL.ARGS.static_graph to True if they are always the same, otherwise "
        "PARALLEL.ARGS.find_unused_parameters. DDP says: {0}",
    ),
    ('(.*missing the required "forward".*)', MismatchError, "{0}"),
)


def raise_clearer(error: Exception, batch: object = None) -> None:
    """Raise a clearer error for one of a model, its loss or its backward pass. Without one, add a note and return.

    Args:
        error: the error.
        batch: what the model was called with, for the note; None: there is no note.
    """
    for pattern, kind, text in _CLEARER:
        if found := re.search(pattern, str(error), re.DOTALL):
            raise kind(text.format(*found.groups())) from error
    parts = batch if isinstance(batch, list | tuple) else ()
    texts = [part for part in parts if isinstance(part, list | tuple) and part and isinstance(part[0], str)]
    if texts and "must be Tensor, not" in str(error):
        clear = "the labels are strings: number them, such as by label = class_names.index(label)"
        raise MismatchError(clear) from error
    if batch is not None and not isinstance(error, ConfigError):
        error.add_note(f"with {describe(batch)} as batch")


def describe(value: object) -> str:
    """Describe a value's type and shapes for error messages."""
    return f"a {_described(value, 0)}"


def _described(value: object, depth: int) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    entries = value if isinstance(value, Mapping) else fields_of(value)
    if entries and depth < 3:
        parts = ", ".join(f"{name}: {_described(part, depth + 1)}" for name, part in entries.items())
        return f"{type(value).__name__} {{{parts}}}"
    if isinstance(value, tuple | list) and depth < 3 and len(value) <= 8:
        return f"{type(value).__name__} ({', '.join(_described(part, depth + 1) for part in value)})"
    return type(value).__name__
