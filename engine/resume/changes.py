"""What a resumed run takes from its config and what from the checkpoint, where they differ.

The rules are those of the table in ``docs/checkpoints.md``: :data:`EFFECTS` has a line for each of its rows.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from ...config import CfgNode, ConfigError
from ...hooks.common.optimizers import optimizers_of
from ..checkpoint.torch_files import printable
from ..solver import LRMultiplier

__all__ = [
    "EFFECTS",
    "apply_changes",
    "changes_since",
    "check_changes",
    "describe_changes",
    "epochs_at",
    "hyperparameters",
    "iteration_of",
    "kinds",
    "set_rates",
    "stretches_since",
]

logger = logging.getLogger(__name__)

# How an optimizer computes, not what: load_state_dict() overwrites these too, whatever device it now runs on.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
# Of no meaning to what is computed.
_IGNORED = ("OUTPUT_DIR", "MODEL.WEIGHTS", "MODEL.WEIGHTS_FROM", "MODEL.WEIGHTS_STRICT", "VERSION")

_ORDER = "samples come in another order from the next step on: in this epoch some may be seen twice or not at all"
_SCHEDULE = "the learning rate is from the next step on what the present schedule has at this iteration"

EFFECTS: dict[str, str] = {
    "SOLVER.BASE_LR": _SCHEDULE,
    "SOLVER.MAX_ITER": _SCHEDULE,
    "SOLVER.LR_SCHEDULER_NAME": _SCHEDULE,
    "SOLVER.LR_SCHEDULER_ARGS": _SCHEDULE,
    "SOLVER.STEPS": _SCHEDULE,
    "SOLVER.GAMMA": _SCHEDULE,
    "SOLVER.WARMUP": _SCHEDULE,
    "SOLVER.OPTIMIZER.ARGS": "used from the next step on; the optimizer's running averages are kept",
    "SOLVER.WEIGHT_DECAY": "used from the next step on; the optimizer's running averages are kept",
    "SOLVER.MOMENTUM": "used from the next step on; the optimizer's running averages are kept",
    "SOLVER.ACCUMULATION_STEPS": "the same batches and, up to rounding, gradients; batch norm sees other parts",
    "SOLVER.AMP": "used from the next step on; a loss scale that the checkpoint does not have starts fresh",
    "DATALOADER.BATCH_SIZE": "the epoch goes on at the same sample; an iteration is one update, of whatever size, so "
    "their count goes on, and lengths in epochs end with the epochs",
    "DATALOADER.NUM_WORKERS": "the same batches in the same order",
    "DATALOADER.SAMPLER_TRAIN": _ORDER,
    "DATALOADER.SAMPLER_ARGS": _ORDER,
    "DATASETS.TRAIN": "the epoch goes on at its position, in the order that the present data has",
    "SEED": _ORDER + "; random generators go on as the checkpoint has them",
    "MODEL": "the weights fit, and are the checkpoint's; the rest of the model is the config's",
    "HOOKS": "the hooks are the config's; new ones start fresh, and of those that are gone the state is dropped",
    "": "the config's value is used from now on",
}
"""What happens where the config has another value than the checkpoint, by the beginning of the key."""


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What each parameter group is set to, without the parameters."""
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def kinds(optimizer: Any, scheduler: Any) -> dict[str, str]:
    """The classes of optimizer and scheduler, whose states no other class can take over."""
    names = [type(one).__name__ for one in optimizers_of(optimizer)]
    return {"optimizer": ", ".join(names), "scheduler": type(scheduler).__name__}


def changes_since(saved: str, cfg: CfgNode) -> dict[str, tuple[Any, Any]]:
    """The keys that differ between the config a checkpoint was written under and this run's.

    Args:
        saved: the dump of the former.
        cfg: the latter.

    Returns:
        (former value, present value) by full key; those that make no difference, such as OUTPUT_DIR, left out.
    """
    before = cfg.clone()
    before.defrost()
    before.set_new_allowed(True)
    before.merge_from_other_cfg(CfgNode.load_cfg(saved))
    return {key: pair for key, pair in cfg.diff(before).items() if key not in _IGNORED}


def check_changes(
    path: str, saved: Mapping[str, str], present: Mapping[str, str], cfg: CfgNode, differences: Sequence[str] = ()
) -> None:
    """Refuse what a resume cannot do: another model, another kind of optimizer, of a schedule that cannot be moved.

    Args:
        path: of the checkpoint.
        saved, present: :func:`kinds` of the run that wrote the checkpoint, and of this one.
        cfg: the present config.
        differences: what of the checkpoint's weights does not fit the model.

    Raises:
        ConfigError: it says what to do.
    """
    instead = f"To begin a new run with its weights, leave out --resume and set MODEL.WEIGHTS to {path}"
    if differences:
        raise ConfigError(
            f"MODEL: {path} is of another model than {cfg.MODEL.NAME} with these MODEL.ARGS, and cannot be resumed "
            f"from; set them back. {instead}.\n" + "\n".join(differences)
        )
    if saved.get("optimizer", present["optimizer"]) != present["optimizer"]:
        raise ConfigError(
            f"SOLVER.OPTIMIZER.NAME: {path} holds the state of {saved['optimizer']}, which {present['optimizer']} "
            f"cannot go on from; set it back to {saved['optimizer']} to resume. {instead}"
        )
    if saved.get("scheduler", present["scheduler"]) != present["scheduler"]:
        raise ConfigError(
            f"SOLVER.LR_SCHEDULER_NAME: {path} holds the state of a {saved['scheduler']}, which a "
            f"{present['scheduler']} cannot go on from; set it back to resume. Among the schedules that hookline has "
            f"itself, any change is fine. {instead}"
        )


def describe_changes(changes: Mapping[str, tuple[Any, Any]], world_size: tuple[int, int]) -> list[str]:
    """What is different now and what that means, a text for each.

    Args:
        changes: see :func:`changes_since`.
        world_size: the number of processes before and now.
    """
    texts = []
    for key, (before, now) in changes.items():
        effect = next(text for start, text in EFFECTS.items() if key.startswith(start))
        texts.append(f"Resuming with another {printable(key)}: {now!r} instead of {before!r}; {effect}")
    if world_size[0] != world_size[1]:
        texts.append(
            f"Resuming with {world_size[1]} process(es) instead of {world_size[0]}: batches are the same, and each "
            "sample of the epoch is still seen once; what each process draws at random is not as it would have been"
        )
    return texts


def apply_changes(
    optimizer: Optimizer,
    scheduler: Any,
    built: list[dict[str, Any]],
    saved_built: list[dict[str, Any]],
    changes: Mapping[str, tuple[Any, Any]],
) -> None:
    """After a checkpoint was loaded, have the config win where it was changed since.

    What hooks or schedules changed in the course of the run stays as the checkpoint has it: only what the config sets
    otherwise than when the checkpoint was written is set anew.

    Args:
        optimizer, scheduler: with the checkpoint's state.
        built: :func:`hyperparameters` as the present config made them.
        saved_built: as the former config had made them.
        changes: see :func:`changes_since`.
    """
    for group, new, old in zip(optimizer.param_groups, built, saved_built, strict=True):
        for key, value in new.items():
            if key in _IMPLEMENTATION or (key != "lr" and old.get(key) != value):
                group[key] = copy.deepcopy(value)
    if not any(key.startswith("SOLVER.") for key in changes):
        return
    if not isinstance(scheduler, LRMultiplier):
        logger.warning("%s goes on as the checkpoint has it: it cannot be moved", type(scheduler).__name__)
        return
    scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    set_rates(optimizer, scheduler)


def set_rates(optimizer: Optimizer, scheduler: LRMultiplier) -> None:
    """Give the optimizer the learning rates that the schedule has at its present iteration."""
    for group, lr in zip(optimizer.param_groups, scheduler.get_lr(), strict=True):
        group["lr"] = lr


# ---------------------------------------------------------------------- epochs of different lengths

Stretch = tuple[int, float, int]
"""A part of a run with one length of epoch: its first iteration, the epochs done before it, iterations an epoch."""


def stretches_since(
    saved: Sequence[Sequence[float]], iteration: int, epoch: int, position: int, iters_per_epoch: int | None
) -> list[Stretch]:
    """The parts of a run in which epochs had different numbers of iterations, as they have with another batch size.

    Args:
        saved: those up to the checkpoint; empty if epochs had no known length.
        iteration: the first of the resumed run.
        epoch, position: where in the data it begins; ``position`` in iterations of the present length.
        iters_per_epoch: the present one; None if it is not known.

    Returns:
        The parts, the present one last; empty if there is none that is known.
    """
    stretches = [(int(start), float(epochs), int(length)) for start, epochs, length in saved]
    if not iters_per_epoch or (stretches and stretches[-1][2] == iters_per_epoch):
        return stretches
    if not stretches and iteration:
        return []
    return [*stretches, (iteration, epoch + position / iters_per_epoch, iters_per_epoch)]


def iteration_of(epochs: float, stretches: Sequence[Stretch]) -> int:
    """The number of iterations after so many epochs of such a run."""
    start, before, length = [stretch for stretch in stretches if stretch[1] <= epochs][-1]
    return max(1, start + round((epochs - before) * length))


def epochs_at(iteration: int, stretches: Sequence[Stretch]) -> float:
    """The number of epochs after so many iterations of such a run: the inverse of :func:`iteration_of`."""
    start, before, length = [stretch for stretch in stretches if stretch[0] <= iteration][-1]
    return before + (iteration - start) / length
