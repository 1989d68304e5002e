"""Helpers for optimizers and learning rate schedules."""

import inspect
from typing import Any, Protocol, runtime_checkable

from fvcore.common.param_scheduler import ParamScheduler

from ...config import ConfigError

__all__ = ["BEFORE_END", "TimmScheduler", "optimizers_of", "refuse_closure", "takes_epoch", "value_at"]

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
