"""Helpers for optimizers and learning rate schedules."""

from typing import Any, Protocol, runtime_checkable

from fvcore.common.param_scheduler import ParamScheduler

__all__ = ["BEFORE_END", "TimmScheduler", "optimizers_of", "value_at"]

BEFORE_END = 1 - 2 * ParamScheduler.WHERE_EPSILON
"""The last point at which fvcore's stepwise schedules are defined: they add the epsilon."""


@runtime_checkable
class TimmScheduler(Protocol):
    """The interface of timm's schedulers, whose methods take the number of the epoch and of the update."""

    def step(self, epoch: int) -> None:
        """Set the rates for an epoch, if the scheduler counts epochs."""

    def step_update(self, num_updates: int) -> None:
        """Set the rates after a number of updates, if the scheduler counts updates."""

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state."""


def optimizers_of(optimizer: Any) -> list[Any]:
    """Return the optimizers of an ``OptimizerList``; for any other optimizer a list of it alone."""
    optimizers: list[Any] = getattr(optimizer, "optimizers", [optimizer])
    return optimizers


def value_at(schedule: ParamScheduler, where: float) -> float:
    """Return a schedule's value, also at the end, where fvcore's constant and stepwise schedules raise."""
    where = min(where, 1.0)
    try:
        return schedule(where)
    except (IndexError, RuntimeError):
        if where < BEFORE_END:
            raise
        return schedule(BEFORE_END)
