"""``SOLVER.OPTIMIZERS``: the config, the optimizer and the schedule of each part of a model."""

from collections.abc import Mapping
from typing import Any

from fvcore.common.param_scheduler import ParamScheduler
from torch import nn
from torch.optim.lr_scheduler import LRScheduler as TorchScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...config import CfgNode, ConfigError, suggest
from ...config.slots import errors_at
from ...hooks import LRScheduler
from ...hooks.common.models import TimmScheduler
from .frozen_model import NothingToTrainError
from .lr_scheduler import LRMultiplier
from .param_rules import find_parameters
from .several import SchedulerList

__all__ = ["check_parts", "has_interval", "parameters_of_parts", "scheduler_hooks", "solver_parts"]

OWN = ("PARAMS", "EVERY")
# Keys of the trainer's step, or of the whole run.
COMMON = (
    *(
        "OPTIMIZERS",
        "MAX_ITER",
        "ACCUMULATION_STEPS",
        "REFERENCE_WORLD_SIZE",
        "CHECKPOINT_PERIOD",
        "TIME_LIMIT",
    ),
    *("CLIP_GRADIENTS", "NONFINITE_LOSS", "NONFINITE_LIMIT", "AMP", "COMPILE_STEP", "COMPILE_STEP_ARGS", "CUDA_GRAPH"),
)


def solver_parts(cfg: CfgNode) -> dict[str, CfgNode]:
    """Return the config of each of ``SOLVER.OPTIMIZERS``: the whole config, with the keys of SOLVER that it sets.

    Raises:
        ConfigError: a part is malformed; the message has the full key.
    """
    allowed = [key for key in cfg.SOLVER if key not in COMMON]
    parts = {}
    for name, entry in cfg.SOLVER.OPTIMIZERS.items():
        key = f"SOLVER.OPTIMIZERS.{name}"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{key}: expected a mapping such as {{PARAMS: head, BASE_LR: 0.01}}, got {entry!r}")
        for own in entry:
            if own in COMMON:
                raise ConfigError(f"{key}.{own}: all optimizers share this key; set SOLVER.{own}")
            if own not in (*OWN, *allowed):
                hint = suggest(own, [*OWN, *allowed]) or "."
                raise ConfigError(f"{key}.{own}: there is no such key{hint} Keys: PARAMS, EVERY and those of SOLVER")
        part = cfg.clone()
        part.defrost()
        part.SOLVER.OPTIMIZERS.clear()
        with errors_at(key):
            part.SOLVER.merge_from_other_cfg(CfgNode({own: entry[own] for own in entry if own not in OWN}))
        if cfg.is_frozen():
            part.freeze()
        parts[name] = part
    return parts


def check_parts(cfg: CfgNode) -> None:
    """Check what the parts of ``SOLVER.OPTIMIZERS`` have beside keys of SOLVER.

    Raises:
        ConfigError: the first problem found.
    """
    without = [name for name, entry in cfg.SOLVER.OPTIMIZERS.items() if "PARAMS" not in entry]
    if len(without) > 1:
        raise ConfigError(
            f"SOLVER.OPTIMIZERS.{without[1]}.PARAMS: is missing; only one optimizer can be without PARAMS, for the "
            "parameters that the others leave"
        )
    for name, entry in cfg.SOLVER.OPTIMIZERS.items():
        every = entry.get("EVERY", 1)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"SOLVER.OPTIMIZERS.{name}.EVERY: expected a number of iterations, got {every!r}")


def parameters_of_parts(cfg: CfgNode, model: nn.Module) -> dict[str, set[nn.Parameter]]:
    """Return the trainable parameters of each of ``SOLVER.OPTIMIZERS``.

    Raises:
        ConfigError: a parameter belongs to two optimizers or to none, or an optimizer has no parameters.
    """
    check_parts(cfg)
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not names:
        raise NothingToTrainError(f"MODEL.NAME: {type(model).__name__} has no parameter that requires a gradient")
    owner: dict[nn.Parameter, str] = {}
    rest = ""
    for part, entry in cfg.SOLVER.OPTIMIZERS.items():
        if "PARAMS" not in entry:
            rest = part
            continue
        for parameter in find_parameters(model, entry["PARAMS"], f"SOLVER.OPTIMIZERS.{part}.PARAMS").values():
            if owner.setdefault(parameter, part) != part:
                raise ConfigError(
                    f"SOLVER.OPTIMIZERS.{part}.PARAMS: {names.get(parameter)} belongs to {owner[parameter]} already"
                )
    left = [parameter for parameter in names if parameter not in owner]
    if left and not rest:
        more = f" and {len(left) - 1} others belong" if len(left) > 1 else " belongs"
        raise ConfigError(
            f"SOLVER.OPTIMIZERS: {names[left[0]]}{more} to no optimizer; add an optimizer without PARAMS for the rest"
        )
    owner |= dict.fromkeys(left, rest)
    parts = {part: {p for p in names if owner[p] == part} for part in cfg.SOLVER.OPTIMIZERS}
    for part, own in parts.items():
        if not own:
            raise ConfigError(f"SOLVER.OPTIMIZERS.{part}: has no parameter that requires a gradient")
    return parts


def scheduler_hooks(cfg: CfgNode, scheduler: Any) -> list[LRScheduler]:
    """Return the hooks that step the trainer's schedules: one, or one for each of a ``SchedulerList``."""
    if not isinstance(scheduler, SchedulerList):
        return [LRScheduler(**_options(cfg, scheduler))]
    parts = solver_parts(cfg)
    return [
        LRScheduler(name=f"lr/{name}", part=name, **_options(parts.get(name, cfg), one))
        for name, one in scheduler.named.items()
    ]


def has_interval(scheduler: Any) -> bool:
    """Return whether ``SOLVER.LR_SCHEDULER_INTERVAL`` says when a scheduler is stepped."""
    if isinstance(scheduler, TorchScheduler):
        return not isinstance(scheduler, LRMultiplier | ReduceLROnPlateau)
    return not isinstance(scheduler, TimmScheduler | ParamScheduler)


def _options(cfg: CfgNode, scheduler: Any) -> dict[str, Any]:
    if isinstance(scheduler, ReduceLROnPlateau):
        return {"metric": cfg.SOLVER.LR_SCHEDULER_METRIC or cfg.CHECKPOINT.BEST.METRIC or None}
    return {"interval": cfg.SOLVER.LR_SCHEDULER_INTERVAL} if has_interval(scheduler) else {}
