"""What a loss receives: the target in a batch, and the parameter that the target is passed to."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ...config.errors import ConfigError, MismatchError, suggest
from ...config.signatures import what_it_takes
from ...hooks.common.tensors import fields_of
from .call_plan import compose, entry
from .inputs import check_names, describe, forward_of

__all__ = ["TARGET_NAMES", "is_torch_loss", "name_of", "target_name", "target_of", "target_parameter"]

TARGET_NAMES = ("label", "labels", "y", "target", "targets")
"""Default names of the target in a dict batch, and of the parameter of a model that computes its loss."""


def target_name(batch: Mapping[Any, Any], target: str | None, required: bool = True) -> str | None:
    """Return the name of the target in a dict batch; None if it has no target and none is required.

    Args:
        batch: the batch.
        target: MODEL.TARGET; None: one of the default names.
        required: a batch without a target is an error.

    Raises:
        TypeError: there is no target, or several entries may be the target.
    """
    names = [target] if target else TARGET_NAMES
    found = [name for name in names if name in batch]
    if len(found) == 1:
        return found[0]
    there = ", ".join(map(str, batch)) or "nothing"
    if found:
        raise MismatchError(f"the batch's target may be {' or '.join(found)}: set MODEL.TARGET. The batch has: {there}")
    if not required:
        return None
    if target:
        hint = suggest(target, map(str, batch))
        raise MismatchError(f"MODEL.TARGET: the batch has no '{target}'{hint or '.'} The batch has: {there}")
    raise MismatchError(
        f"the batch has no target: none of its entries is named {', '.join(names)}. The batch has: {there}. "
        "MODEL.LOSS and targets need one: set MODEL.TARGET"
    )


def target_of(batch: Any, target: str | None) -> Callable[[Any], Any]:
    """Return the function that reads the target of batches like this one.

    Args:
        batch: the batch.
        target: MODEL.TARGET; None: one of the default names.

    Raises:
        TypeError: the batch has no target.
    """
    if (fields := fields_of(batch)) is not None:
        return compose(entry(target_name(fields, target)), fields_of)
    if isinstance(batch, Mapping):
        return entry(target_name(batch, target))
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return entry(-1)
    raise MismatchError(
        f"expected a batch (x, y) or a dict, got {describe(batch)}. MODEL.LOSS and targets need such batches; "
        'otherwise set MODEL.LOSS.NAME to "" and let the model return its losses'
    )


def is_torch_loss(loss: Any) -> bool:
    """Return whether a loss is one of torch's or a subclass, which takes one tensor and the target."""
    function = getattr(loss, "func", loss)  # of a functools.partial
    return isinstance(loss, nn.modules.loss._Loss) or getattr(function, "__module__", "") == "torch.nn.functional"


def name_of(loss: Any) -> str:
    """Return the name of a loss's function or class."""
    return getattr(getattr(loss, "func", loss), "__name__", type(loss).__name__)


def target_parameter(loss: Any, output_mapping: Mapping[str, str]) -> str:
    """Return the loss's parameter for the target: the first one that no output is mapped to.

    Args:
        loss: a callable, or None.
        output_mapping: MODEL.OUTPUT_MAPPING. If empty, the target is passed by position.

    Raises:
        ConfigError: the loss has no such parameter, or none with a name of the mapping.
    """
    if loss is None or not output_mapping:
        return ""
    taken = what_it_takes(forward_of(loss))
    if taken is None:
        raise ConfigError(f"MODEL.OUTPUT_MAPPING: the signature of {name_of(loss)} cannot be read")
    check_names("MODEL.OUTPUT_MAPPING", name_of(loss), taken, output_mapping.values())
    for name in taken.keywords:
        if name not in output_mapping.values():
            return name
    raise ConfigError(f"MODEL.OUTPUT_MAPPING leaves no parameter of {name_of(loss)} for the target")
