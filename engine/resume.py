"""What a resumed run takes from its config and what from the checkpoint, where they differ."""

import copy
import logging
from typing import Any

from torch.optim import Optimizer

from ..config import CfgNode
from .solver import LRMultiplier

__all__ = ["apply_changes", "changes_since", "hyperparameters"]

logger = logging.getLogger(__name__)

# How an optimizer computes, not what: load_state_dict() overwrites these too, whatever device it now runs on.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What each parameter group is set to, without the parameters."""
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def changes_since(saved: str, cfg: CfgNode) -> dict[str, tuple[Any, Any]]:
    """The keys that differ between the config a checkpoint was written under and this run's.

    Args:
        saved: the dump of the former.
        cfg: the latter.

    Returns:
        (former value, present value) by full key; OUTPUT_DIR and MODEL.WEIGHTS, which do not matter, left out.
    """
    before = cfg.clone()
    before.defrost()
    before.set_new_allowed(True)
    before.merge_from_other_cfg(CfgNode.load_cfg(saved))
    differences = cfg.diff(before)
    return {key: pair for key, pair in differences.items() if key not in ("OUTPUT_DIR", "MODEL.WEIGHTS")}


def apply_changes(
    optimizer: Optimizer,
    scheduler: Any,
    built: list[dict[str, Any]],
    saved_built: list[dict[str, Any]],
    changes: dict[str, tuple[Any, Any]],
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
    for key, (before, now) in changes.items():
        logger.warning("Resuming with another %s: %r instead of %r; the config's value is used", key, now, before)
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
    for group, lr in zip(optimizer.param_groups, scheduler.get_lr(), strict=True):
        group["lr"] = lr
