"""Helpers for models, optimizers and schedules."""

import inspect
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

from fvcore.common.param_scheduler import ParamScheduler
from torch import nn

from ...config import ConfigError, suggest

__all__ = [
    "BEFORE_END",
    "TimmScheduler",
    "describe_no_match",
    "matches",
    "optimizers_of",
    "parameters_of",
    "refuse_closure",
    "takes_epoch",
    "unwrap_model",
    "value_at",
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


BEFORE_END = 1 - 2 * ParamScheduler.WHERE_EPSILON
"""The last point at which fvcore's stepwise schedules are defined: they add the epsilon."""


@runtime_checkable
class TimmScheduler(Protocol):
    """The interface of timm's schedulers, whose methods take the number of the epoch and of the update.

    Those of pytorch-accelerated have it too, but their ``step`` takes no number: see :func:`takes_epoch`.
    """

    def step(self, epoch: int) -> None:
        """Set the rates for an epoch, if the scheduler counts epochs."""

    def step_update(self, num_updates: int) -> None:
        """Set the rates after a number of updates, if the scheduler counts updates."""

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state."""


def takes_epoch(kind: type) -> bool:
    """Return whether the ``step`` of a scheduler's class must be given a number, as timm's that of the epoch."""
    _, *parameters = inspect.signature(kind.step).parameters.values()  # type: ignore[attr-defined]
    return any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)


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


def value_at(schedule: ParamScheduler, where: float) -> float:
    """Return a schedule's value, also at the end, where fvcore's constant and stepwise schedules raise."""
    where = min(where, 1.0)
    try:
        return schedule(where)
    except (IndexError, RuntimeError):
        if where < BEFORE_END:
            raise
        return schedule(BEFORE_END)
