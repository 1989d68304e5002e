"""Helpers for models and optimizers."""

import inspect
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ...config import ConfigError, suggest

__all__ = [
    "describe_no_match",
    "matches",
    "optimizers_of",
    "parameters_of",
    "refuse_closure",
    "unwrap_model",
]

# Names that an error lists at most.
_MAX_LISTED = 20


def unwrap_model(model: Any) -> Any:
    """Return the user's model inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def matches(pattern: str, name: str, module: nn.Module | None = None) -> bool:
    """Return whether a pattern matches a submodule or parameter.

    This is the one meaning of patterns in configs: ``*``, ``?`` and ``[]`` match within one part of a dotted name
    ("blocks.*" matches "blocks.0", not "blocks.0.norm"), or within the name of the module's class ("*Block").

    Args:
        pattern: a pattern or a plain name.
        name: the full dotted name.
        module: the submodule with that name, to match its class and base classes; None for a parameter.
    """
    if module is not None and any(fnmatchcase(cls.__name__, pattern) for cls in _own_classes(module)):
        return True
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def parameters_of(model: nn.Module, pattern: str) -> dict[str, nn.Parameter]:
    """Return the parameters that a pattern matches, and those of the submodules that it matches, by name."""
    found = {}
    modules = [name for name, module in model.named_modules() if name and matches(pattern, _plain(name), module)]
    for name, parameter in model.named_parameters():
        if matches(pattern, _plain(name)) or any(name.startswith(f"{module}.") for module in modules):
            found[_plain(name)] = parameter
    return found


def describe_no_match(model: nn.Module, pattern: str, more: Sequence[str] = ()) -> str:
    """Return the error text for a pattern that matches nothing in a model.

    Args:
        model: the model.
        pattern: the pattern.
        more: names that could also have matched, of parameters for example.
    """
    modules = {name: type(child).__name__ for name, child in model.named_modules() if name}
    classes = sorted(set(modules.values()))
    names = [name for name in modules if name.count(".") <= 1]
    return (
        f"{type(model).__name__} has no submodule and no class that matches {pattern!r}"
        f"{suggest(pattern, [*modules, *classes, *more]) or '.'} "
        f"Submodules: {_listed(names)}. Classes: {_listed(classes)}"
    )


def _plain(name: str) -> str:
    """Return a name without the parts that ``torch.compile`` adds for submodules."""
    return name.replace("_orig_mod.", "")


def _own_classes(module: nn.Module) -> list[type]:
    """Return the module's class and its bases, up to and without ``nn.Module``."""
    classes = type(module).__mro__
    return list(classes[: classes.index(nn.Module)]) if nn.Module in classes else list(classes)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return (", ".join(names[:_MAX_LISTED]) or "none") + more


def optimizers_of(optimizer: Any) -> list[Any]:
    """Return the optimizers of an ``OptimizerList``; for any other optimizer a list of it alone."""
    optimizers: list[Any] = getattr(optimizer, "optimizers", [optimizer])
    return optimizers


def refuse_closure(kind: Any, key: str = "") -> None:
    """Raise an error if the ``step`` of an optimizer's class needs a closure, as that of torch's LBFGS.

    Args:
        kind: the class. Anything else passes.
        key: the config key that names it, for the message.

    Raises:
        ConfigError: it does.
    """
    step = inspect.signature(kind.step).parameters if isinstance(kind, type) and hasattr(kind, "step") else {}
    if "closure" in step and step["closure"].default is inspect.Parameter.empty:
        raise ConfigError(
            f"{f'{key}: ' if key else ''}{kind.__name__} calls the model several times in a step, through a closure, "
            "and a trainer's step calls it once: use another optimizer, or override run_step() and build_optimizer()"
        )
