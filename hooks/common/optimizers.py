"""Helpers for optimizers and learning rate schedules."""

from typing import Any

from fvcore.common.param_scheduler import ParamScheduler

__all__ = ["BEFORE_END", "optimizers_of", "value_at"]

BEFORE_END = 1 - 2 * ParamScheduler.WHERE_EPSILON
"""The last point at which fvcore's stepwise schedules are defined: they add the epsilon."""


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
