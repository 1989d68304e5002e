"""Arguments of a schedule that are known only when the data is: ``"1ep"``, ``"end"``, ``"epochs"``."""

import inspect
import math
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ...config import CfgNode, ConfigError, Duration
from ...config.values import kind_of
from ...hooks.control.lr_scheduler import TimmScheduler, takes_epoch

__all__ = ["resolve_run_values"]

NAMES = ("end", "epochs", "iters_per_epoch", "max_iter")
"""The scheduler's steps in the whole run; epochs of the run; iterations in an epoch; iterations of the run."""


def resolve_run_values(
    cfg: CfgNode, target: Any, iters_per_epoch: int | None, iterations: Callable[[Any], int] | None
) -> dict[str, Any]:
    """Return ``SOLVER.LR_SCHEDULER_ARGS`` with numbers for durations and names of values.

    A duration (``"1ep"``, ``"500it"``) becomes a number of the scheduler's steps. Arguments that ``target`` annotates
    as ``str`` are left as they are.

    Args:
        cfg: the config.
        target: the schedule's class or function.
        iters_per_epoch: iterations in an epoch; None if unknown.
        iterations: converts a duration to iterations. Default: by ``iters_per_epoch``.

    Raises:
        ConfigError: a value needs the length of an epoch, which is unknown; or it is a time.
    """
    clock = _clock_of(cfg, kind_of(target))

    def to_iterations(length: Any) -> int:
        duration = Duration.parse_length(length)
        return duration.iterations(iters_per_epoch) if iterations is None else iterations(length)

    def epoch() -> int:
        if iters_per_epoch is None:
            raise ConfigError("the length of an epoch of this data is unknown; use iterations")
        return iters_per_epoch

    def to_epochs(length: Any) -> float:
        duration = Duration.parse_length(length)
        return duration.value if duration.unit == "ep" else duration.value / epoch()

    def number(value: str) -> int:
        length = cfg.SOLVER.MAX_ITER if value in NAMES else value
        if value == "iters_per_epoch":
            return epoch()
        if value == "epochs" or (value == "end" and clock == "epoch"):
            return math.ceil(to_epochs(length))
        if clock == "epoch" and value != "max_iter":
            return max(1, round(to_epochs(length)))
        if clock == "evaluation" and value != "max_iter":
            return max(1, round(to_iterations(length) / to_iterations(cfg.TEST.EVAL_PERIOD)))
        return to_iterations(length)

    def replaced(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(replaced, value))
        return number(value) if isinstance(value, str) and _is_run_value(value) else value

    values = {}
    texts = _text_parameters(target)
    for name, value in cfg.SOLVER.LR_SCHEDULER_ARGS.items():
        try:
            values[name] = value if name in texts else replaced(value)
        except ConfigError as error:
            raise ConfigError(f"SOLVER.LR_SCHEDULER_ARGS.{name}: {error}") from None
    return values


def _clock_of(cfg: CfgNode, kind: Any) -> str:
    """Return what a scheduler of a class counts: "iteration", "epoch" or "evaluation".

    timm's count epochs, unless ``t_in_epochs`` is False; pytorch-accelerated's count iterations.
    """
    if isinstance(kind, type) and issubclass(kind, TimmScheduler) and not issubclass(kind, LRScheduler):
        by_epoch = takes_epoch(kind) and cfg.SOLVER.LR_SCHEDULER_ARGS.get("t_in_epochs", True)
        return "epoch" if by_epoch else "iteration"
    return str(cfg.SOLVER.LR_SCHEDULER_INTERVAL)


def _is_run_value(value: str) -> bool:
    try:
        return value in NAMES or (not value.isdigit() and bool(Duration.parse(value)))
    except ConfigError:
        return False


def _text_parameters(target: Any) -> set[str]:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return set()
    return {name for name, parameter in parameters.items() if parameter.annotation in (str, "str")}
