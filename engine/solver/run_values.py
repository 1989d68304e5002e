"""Arguments of a schedule that are known only when the data is: ``"1ep"``, ``"end"``, ``"epochs"``."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch.optim.lr_scheduler import LRScheduler

from ...config import CfgNode, ConfigError, Duration
from ...hooks.common.models import TimmScheduler, takes_epoch

__all__ = ["Clock", "clock_of", "has_run_values", "resolve_run_values"]

NAMES = ("end", "epochs", "iters_per_epoch", "max_iter")
"""The scheduler's steps in the whole run; epochs of the run; iterations in an epoch; iterations of the run."""

Clock = Literal["iteration", "epoch", "evaluation"]
"""What a scheduler counts."""


def clock_of(cfg: CfgNode, target: Any) -> Clock:
    """Return what the scheduler of the class ``target`` counts. timm's count epochs, unless ``t_in_epochs`` is False;
    pytorch-accelerated's count iterations."""
    if isinstance(target, type) and issubclass(target, TimmScheduler) and not issubclass(target, LRScheduler):
        by_epoch = takes_epoch(target) and cfg.SOLVER.LR_SCHEDULER_ARGS.get("t_in_epochs", True)
        return "epoch" if by_epoch else "iteration"
    clock: Clock = cfg.SOLVER.LR_SCHEDULER_INTERVAL
    return clock


def resolve_run_values(
    cfg: CfgNode,
    target: Any,
    clock: Clock,
    iters_per_epoch: int | None,
    iterations: Callable[[Any], int] | None = None,
) -> dict[str, Any]:
    """Return ``SOLVER.LR_SCHEDULER_ARGS`` with numbers for durations and names of values.

    A duration (``"1ep"``, ``"500it"``) becomes a number of the scheduler's steps. Arguments that ``target`` annotates
    as ``str`` are left as they are.

    Args:
        cfg: the config.
        target: the schedule's class or function.
        clock: what the scheduler counts.
        iters_per_epoch: iterations in an epoch; None if unknown.
        iterations: converts a duration to iterations. Default: by ``iters_per_epoch``.

    Raises:
        ConfigError: a value needs the length of an epoch, which is unknown; or it is a time.
    """

    def to_iterations(value: Any) -> int:
        duration = Duration.parse_length(value)
        return iterations(value) if iterations is not None else duration.iterations(iters_per_epoch)

    def epoch() -> int:
        if iters_per_epoch is None:
            raise ConfigError("the length of an epoch of this data is unknown; use iterations")
        return iters_per_epoch

    def epochs() -> int:
        length = Duration.parse_length(cfg.SOLVER.MAX_ITER)
        return math.ceil(length.value if length.unit == "ep" else length.value / epoch())

    def steps(value: Any) -> int:
        duration = Duration.parse_length(value)
        if clock == "epoch":
            in_epochs = duration.value if duration.unit == "ep" else duration.value / epoch()
            return max(1, round(in_epochs))
        if clock == "evaluation":
            return max(1, round(to_iterations(value) / to_iterations(cfg.TEST.EVAL_PERIOD)))
        return to_iterations(value)

    def number(value: str) -> int:
        if value == "end":
            return epochs() if clock == "epoch" else steps(cfg.SOLVER.MAX_ITER)
        if value == "epochs":
            return epochs()
        if value == "iters_per_epoch":
            return epoch()
        return to_iterations(cfg.SOLVER.MAX_ITER) if value == "max_iter" else steps(value)

    return _replace(cfg.SOLVER.LR_SCHEDULER_ARGS, target, number)


def has_run_values(args: Mapping[str, Any], target: Any) -> bool:
    """Return whether an argument is a duration or the name of a value."""
    found = []
    _replace(args, target, lambda value: found.append(value) or 1)  # type: ignore[func-returns-value]
    return bool(found)


def _replace(args: Mapping[str, Any], target: Any, number: Callable[[str], int]) -> dict[str, Any]:
    def replaced(value: Any, name: str) -> Any:
        if isinstance(value, str) and _is_run_value(value):
            try:
                return number(value)
            except ConfigError as error:
                raise ConfigError(f"SOLVER.LR_SCHEDULER_ARGS.{name}: {error}") from None
        if isinstance(value, list | tuple):
            return type(value)(replaced(item, name) for item in value)
        return value

    texts = _text_parameters(target)
    return {name: value if name in texts else replaced(value, name) for name, value in args.items()}


def _is_run_value(value: str) -> bool:
    if value in NAMES:
        return True
    try:
        return not value.isdigit() and bool(Duration.parse(value))
    except ConfigError:
        return False


def _text_parameters(target: Any) -> set[str]:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return set()
    return {name for name, parameter in parameters.items() if parameter.annotation in (str, "str")}
