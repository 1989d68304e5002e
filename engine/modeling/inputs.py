"""How the inputs in a batch become the arguments of the model's ``forward``."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...config.errors import ConfigError, MismatchError, suggest
from ...config.signatures import Taken

__all__ = ["INPUT_FORMS", "caller", "check_names", "describe", "forward_of", "required_positions"]

INPUT_FORMS = ("auto", "batch", "tuple", "kwargs")
"""Values of MODEL.INPUTS."""


def caller(
    model: Callable[..., Any],
    taken: Taken | None,
    example: Any,
    form: str,
    mapping: Mapping[str, str],
    *,
    target: str | None = None,
    exact: bool = True,
    several: bool = False,
    guess_dict: bool = True,
) -> Callable[[Any], Any]:
    """Return a function that calls a model with inputs like ``example``.

    Args:
        model: the model.
        taken: the parameters of its ``forward``; None if they are not known.
        example: inputs. Later ones have the same type, and the same length or names.
        form: one of :data:`INPUT_FORMS`.
        mapping: from names of inputs to names of ``forward``'s parameters.
        target: the name of an entry that is not an input.
        exact: every name in ``mapping`` must be in ``example``.
        several: ``example`` is a sequence of inputs, not one input that is a sequence.
        guess_dict: "auto" may pass a dict as one argument.

    Returns:
        A function from inputs to the model's output; the model itself if it receives the inputs unchanged.

    Raises:
        TypeError: the inputs do not fit ``forward``; the message lists the names of both.
    """
    if form == "batch":
        return model
    if isinstance(example, Mapping):
        if form == "tuple":
            raise MismatchError(
                f'MODEL.INPUTS is "tuple", but the inputs are {describe(example)}; use "kwargs" or "batch"'
            )
        names = [name for name in example if name != target]
        if form == "auto" and guess_dict and _takes_whole_dict(taken, names):
            return model
        return _by_name(model, taken, names, example, mapping, target, exact)
    if form == "kwargs":
        raise MismatchError(
            'MODEL.INPUTS "kwargs" and MODEL.INPUT_MAPPING need inputs in a dict, by their names; '
            f"these are {describe(example)}"
        )
    if not isinstance(example, tuple | list):
        return model
    if form == "tuple" or several or (taken is not None and len(required_positions(taken)) > 1):
        _check_number(taken, example)
        return lambda inputs: model(*inputs)
    return model


def forward_of(model: Any) -> Callable[..., Any]:
    """Return the ``forward`` of a module; any other callable itself."""
    return getattr(model, "forward", model)


def describe(value: Any) -> str:
    """Describe a value's type and shape for error messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} {{{', '.join(f'{name!r}: {describe(v)}' for name, v in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def check_names(
    key: str, label: str, taken: Taken | None, names: Iterable[Any], error: type[Exception] = ConfigError
) -> None:
    """Check that a callable takes parameters of these names. Any name is accepted if ``taken`` is None.

    Raises:
        ConfigError: a name is unknown (or another exception of type ``error``).
    """
    for name in names:
        if taken is not None and not _takes(taken, name):
            hint = suggest(name, taken.keywords) or "."
            raise error(f"{key}: {label} takes no '{name}'{hint} It takes: {_listed(taken.keywords)}")


def required_positions(taken: Taken) -> list[str]:
    """Return the required parameters that can be passed by position."""
    return [name for name in taken.required if name in taken.positions]


def _takes_whole_dict(taken: Taken | None, names: Sequence[Any]) -> bool:
    """Return whether ``forward`` takes the dict as one argument: no parameter has the name of an entry."""
    if taken is None:
        return True
    if not (taken.positions or taken.any_position) or any(name in taken.keywords for name in names):
        return False
    return len(taken.required) <= 1


def _check_number(taken: Taken | None, inputs: Sequence[Any]) -> None:
    if taken is None:
        return
    too_many = len(inputs) > len(taken.positions) and not taken.any_position
    if too_many or len(inputs) < len(required_positions(taken)):
        raise MismatchError(
            f"the batch has {len(inputs)} inputs, but the model's forward takes: {_listed(taken.positions)}. "
            'To pass them as one argument, set MODEL.INPUTS to "batch"; a model that also takes the target must '
            "return its losses, without MODEL.LOSS"
        )


def _by_name(
    model: Callable[..., Any],
    taken: Taken | None,
    names: Sequence[Any],
    example: Mapping[Any, Any],
    mapping: Mapping[str, str],
    target: str | None,
    exact: bool,
) -> Callable[[Any], Any]:
    chosen: dict[str, Any] = {}  # from parameter to entry
    for entry, parameter in mapping.items():
        if entry in example:
            chosen[parameter] = entry
        elif exact:
            hint = suggest(entry, map(str, example))
            there = _listed(example)
            raise MismatchError(f"MODEL.INPUT_MAPPING: the batch has no '{entry}'{hint or '.'} It has: {there}")
    for name in names:
        if name not in mapping and name not in chosen and _takes(taken, name):
            chosen[name] = name
    check_names("MODEL.INPUT_MAPPING", "the model's forward", taken, chosen, MismatchError)
    if taken is not None:
        missing = [name for name in taken.required if name not in chosen]
        if missing or not chosen:
            unused = [str(name) for name in names if name not in chosen.values()]
            wanted = f"'{missing[0]}'" if missing else "an input"
            hint = suggest(missing[0], unused) if missing else ""
            entry = unused[0] if unused else "entry"
            raise MismatchError(
                f"the model's forward needs {wanted}, and the batch has no such entry{hint or '.'} "
                f"The batch has: {_listed(example)}{f' (target: {target})' if target else ''}. "
                f"forward takes: {_listed(taken.keywords)}. Rename entries with MODEL.INPUT_MAPPING, such as "
                f'{{{entry}: {(missing or ["parameter"])[0]}}}; to pass the dict itself, set MODEL.INPUTS to "batch"'
            )
    if all(parameter == entry for parameter, entry in chosen.items()) and len(chosen) == len(example):
        return lambda inputs: model(**inputs)
    pairs = tuple(chosen.items())
    return lambda inputs: model(**{parameter: inputs[entry] for parameter, entry in pairs})


def _takes(taken: Taken | None, name: Any) -> bool:
    return isinstance(name, str) and (taken is None or taken.any_keyword or name in taken.keywords)


def _listed(names: Collection[Any]) -> str:
    return ", ".join(map(str, names)) or "nothing"
