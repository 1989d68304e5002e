"""Resume with a changed config: which values come from the config, and which from the checkpoint.

Each key of :data:`EFFECTS` has a row in the table of ``docs/checkpoints.md``.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...config import CfgNode, ConfigError
from ...config.errors import printable
from ...hooks.common.models import optimizers_of
from ..solver import LRMultiplier
from ..solver.several import schedulers_of

__all__ = [
    "EFFECTS",
    "adopt_rates",
    "apply_changes",
    "changes_since",
    "check_changes",
    "continue_without_state",
    "describe_changes",
    "hyperparameters",
    "kinds",
    "rates_of",
    "set_rates",
]

logger = logging.getLogger(__name__)

# Options of the implementation. load_state_dict() overwrites them, although they depend on the present device.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
# These do not affect what is computed.
_IGNORED = ("OUTPUT_DIR", "MODEL.WEIGHTS", "MODEL.WEIGHTS_FROM", "MODEL.WEIGHTS_STRICT", "VERSION")

_ORDER = "the sample order changes at the next step: in this epoch some samples may be seen twice or not at all"
_AVERAGES = "used from the next step on; the optimizer's running averages are kept"
_SCHEDULE = "the learning rate follows the new schedule from the next step on"

EFFECTS: dict[str, str] = {
    "SOLVER.BASE_LR": _SCHEDULE,
    "SOLVER.MAX_ITER": _SCHEDULE,
    "SOLVER.LR_SCHEDULER_NAME": _SCHEDULE,
    "SOLVER.LR_SCHEDULER_ARGS": _SCHEDULE,
    "SOLVER.STEPS": _SCHEDULE,
    "SOLVER.GAMMA": _SCHEDULE,
    "SOLVER.WARMUP": _SCHEDULE,
    "SOLVER.OPTIMIZER.ARGS": _AVERAGES,
    "SOLVER.WEIGHT_DECAY": _AVERAGES,
    "SOLVER.PARAM_GROUPS": _AVERAGES,
    "SOLVER.LAYER_DECAY": _AVERAGES,
    "SOLVER.MOMENTUM": _AVERAGES,
    "SOLVER.ACCUMULATION_STEPS": "same batches, same gradients up to rounding; batch norm sees other micro-batches",
    "SOLVER.AMP": "used from the next step on; a loss scale that is not in the checkpoint starts at its default",
    "DATALOADER.BATCH_SIZE": "the epoch continues at the same sample; the iteration count continues (one iteration is "
    "one update of any size), and lengths in epochs are recomputed",
    "DATALOADER.NUM_WORKERS": "the same batches in the same order",
    "DATALOADER.SAMPLER_TRAIN": _ORDER,
    "DATALOADER.SAMPLER_ARGS": _ORDER,
    "DATASETS.TRAIN": "the epoch continues at its position, in the order of the new data",
    "SEED": _ORDER + "; random generators continue from the checkpoint",
    "MODEL": "the weights are the checkpoint's; everything else of the model is the config's",
    "HOOKS": "the hooks are the config's; new hooks start without state, and states of removed hooks are dropped",
    "": "the config's value is used from now on",
}
"""The effect of a changed key, by the start of the key."""


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of each parameter group without its parameters."""
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def kinds(optimizer: Any, scheduler: Any, model: nn.Module) -> dict[str, Any]:
    """Return the class names of optimizer and scheduler, and the parameters' names by group. Their states fit only
    the same ones."""
    names = [type(one).__name__ for one in optimizers_of(optimizer)]
    schedules = [type(one).__name__ for one in schedulers_of(scheduler)]
    name_of = {parameter: name.replace("_orig_mod.", "") for name, parameter in model.named_parameters()}
    groups = [[name_of.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]
    return {"optimizer": ", ".join(names), "scheduler": ", ".join(schedules), "groups": groups}


def changes_since(saved: str, cfg: CfgNode) -> dict[str, tuple[Any, Any]]:
    """Return the keys that differ between a checkpoint's config and this run's.

    Args:
        saved: the checkpoint's config, as YAML.
        cfg: this run's config.

    Returns:
        (old value, new value) by full key, without keys that do not affect training, such as OUTPUT_DIR.
    """
    before = cfg.clone()
    before.defrost()
    before.set_new_allowed(True)
    before.merge_from_other_cfg(CfgNode.load_cfg(saved))
    return {key: pair for key, pair in cfg.diff(before).items() if key not in _IGNORED}


def check_changes(
    path: str, saved: Mapping[str, Any], present: Mapping[str, Any], cfg: CfgNode, differences: Sequence[str] = ()
) -> None:
    """Check that the checkpoint fits this run's model, optimizer class and schedule class.

    Args:
        path: the checkpoint.
        saved, present: :func:`kinds` of the run that wrote the checkpoint, and of this one.
        cfg: this run's config.
        differences: the checkpoint's weights that do not fit the model.

    Raises:
        ConfigError: it does not fit. The message has the remedy.
    """
    instead = f"To start a new run from its weights, leave out --resume and set MODEL.WEIGHTS to {path}"
    if differences:
        raise ConfigError(
            f"MODEL: the weights in {path} do not fit {cfg.MODEL.NAME} with these MODEL.ARGS; to resume, change them "
            f"back. {instead}.\n" + "\n".join(differences)
        )
    if saved.get("optimizer", present["optimizer"]) != present["optimizer"]:
        raise ConfigError(
            f"SOLVER.OPTIMIZER.NAME: {path} holds the state of {saved['optimizer']}, which {present['optimizer']} "
            f"cannot load; to resume, change it back to {saved['optimizer']}. {instead}"
        )
    before, now = saved.get("groups", present["groups"]), present["groups"]
    if before != now and sorted(chain(*before)) == sorted(chain(*now)):  # torch assigns states by position
        raise ConfigError(
            f"SOLVER.PARAM_GROUPS: {path} holds the optimizer's state of parameters in other groups; to resume, change "
            "back what groups them (PARAM_GROUPS, LAYER_DECAY, OPTIMIZERS, a factor or decay of biases and norms, or "
            f"build_optimizer). {instead}"
        )
    if saved.get("scheduler", present["scheduler"]) != present["scheduler"]:
        raise ConfigError(
            f"SOLVER.LR_SCHEDULER_NAME: {path} holds the state of {saved['scheduler']}, which "
            f"{present['scheduler']} cannot load; to resume, change it back. A resume can change between any two of "
            f"hookline's own schedules. {instead}"
        )


def describe_changes(changes: Mapping[str, tuple[Any, Any]], world_size: tuple[int, int]) -> list[str]:
    """Return one message for each change: the values and the effect.

    Args:
        changes: see :func:`changes_since`.
        world_size: the old and the new number of processes.
    """
    texts = []
    for key, (before, now) in changes.items():
        effect = next(text for start, text in EFFECTS.items() if key.startswith(start))
        texts.append(f"Resuming with {printable(key)} = {now!r} instead of {before!r}: {effect}")
    if world_size[0] != world_size[1]:
        texts.append(
            f"Resuming with {world_size[1]} process(es) instead of {world_size[0]}: batches are the same and each "
            "sample of the epoch is seen once, but random numbers in each process differ"
        )
    return texts


def apply_changes(
    optimizer: Optimizer,
    scheduler: Any,
    built: list[dict[str, Any]],
    saved_built: list[dict[str, Any]],
    changes: Mapping[str, tuple[Any, Any]],
) -> None:
    """Apply the config's changes to an optimizer and scheduler that have the checkpoint's state.

    Only changed values are applied. Changes by hooks or schedules during training are kept.

    Args:
        optimizer, scheduler: with the checkpoint's state.
        built: :func:`hyperparameters` built from this run's config.
        saved_built: those built from the checkpoint's config.
        changes: see :func:`changes_since`.
    """
    for group, new, old in zip(optimizer.param_groups, built, saved_built, strict=True):
        for key, value in new.items():
            if key in _IMPLEMENTATION or (key != "lr" and old.get(key) != value):
                group[key] = copy.deepcopy(value)
    if not any(key.startswith("SOLVER.") for key in changes):
        return
    for one in schedulers_of(scheduler):
        if isinstance(one, LRMultiplier):  # the others: see schedule_length.py
            one.base_lrs = [group["initial_lr"] for group in one.optimizer.param_groups]
            set_rates(one)


def continue_without_state(content: Mapping[str, Any]) -> int:
    """Return the iteration of a checkpoint that does not hold the trainer's state."""
    iteration: int = content.get("iteration", -1)
    logger.warning(
        "The checkpoint holds no state of the trainer: training continues at iteration %d, but the optimizer (if "
        "the checkpointer does not save it), hooks, data and random numbers start fresh. To save them, build the "
        "checkpointer with trainer=weakref.proxy(self)",
        iteration + 1,
    )
    return iteration


def rates_of(optimizer: Any) -> list[tuple[dict[str, Any], float]]:
    """Return the parameter groups and their present learning rates."""
    return [(group, float(group.get("lr", 0.0))) for group in optimizer.param_groups]


def adopt_rates(scheduler: Any, before: Sequence[tuple[dict[str, Any], float]]) -> None:
    """Make learning rates that were set by hand the base rates of their schedules.

    Args:
        scheduler: the schedules.
        before: :func:`rates_of` the optimizer when its rates were last set by the schedules.

    Raises:
        ConfigError: the schedule replaces the rate in the next step, since it is not constant or not hookline's own.
    """
    for one in schedulers_of(scheduler):
        groups = getattr(getattr(one, "optimizer", None), "param_groups", ())
        for index, group in enumerate(groups if not isinstance(one, ReduceLROnPlateau) else ()):
            old = next((lr for other, lr in before if other is group), None)
            new, base = float(group.get("lr", 0.0)), float(group.get("initial_lr", 0.0))
            if old is None or new in (old, base):
                continue
            if not isinstance(one, LRMultiplier) or old != base:
                raise ConfigError(
                    f"optimizer.param_groups: the learning rate was set to {new:g}, but the schedule sets it in each "
                    f"step ({type(one).__name__}, now {old:g}). Set it back; for another rate, make a new trainer with "
                    "that SOLVER.BASE_LR (Trainer: lr), and resume"
                )
            one.base_lrs[index] = group["initial_lr"] = new
            logger.info("The learning rate was set to %g instead of %g, and is the schedule's base rate now", new, old)


def set_rates(scheduler: Any) -> None:
    """Set learning rates to the present ones of hookline's own schedules."""
    for one in schedulers_of(scheduler):
        for group, lr in zip(one.optimizer.param_groups, one.get_lr(), strict=True):
            group["lr"] = lr
