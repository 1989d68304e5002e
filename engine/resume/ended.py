"""Runs that have ended: whether ``train()`` continues them, and what it returns if not."""

import logging
from collections.abc import Mapping
from typing import Any

from ... import hooks
from ...config import CfgNode, ConfigError
from ...hooks.hook_list import arguments_of
from ...hooks.storage.event_storage import EventStorage
from ..train_loop import TrainResult
from .changes import adopt_rates, changes_since

__all__ = ["check_changes_by_hand", "check_has_last_weights", "previous_end", "previous_result"]

logger = logging.getLogger(__name__)

# Keys that decide what training computes. If one changes, the reason for a stop may no longer hold.
_COMPUTATION = ("SOLVER.", "MODEL.", "DATASETS.", "DATALOADER.BATCH_SIZE", "SEED")

# Keys that are read when the trainer is built.
_BUILT = ("SOLVER.", "MODEL.", "DATASETS.TRAIN", "DATALOADER.", "SEED")


def previous_end(trainer: Any) -> Mapping[str, Any] | None:
    """Return how the run ended if there is nothing left to train, else None. See :meth:`TrainerBase._end`."""
    end: Mapping[str, Any] | None = trainer._loaded_end
    if trainer._result is not None and end is None:  # trained by this trainer: only a complete run has ended
        end = trainer._end() if trainer.finished_iter + 1 >= trainer.max_iter else None
        return None if end is None else {**end, "complete": True}
    if end is None or end["iteration"] >= trainer.max_iter:
        return end
    if trainer.max_iter > end["max_iter"]:
        return None
    change = _change_since_stop(trainer, end["by"])
    if not change:
        return end
    logger.info("The run was stopped at iteration %d: %s. It continues: %s", end["iteration"], end["reason"], change)
    return None


def _change_since_stop(trainer: Any, by: Mapping[str, Any] | None) -> str:
    """Describe what has changed about the cause of a stop; empty if nothing has.

    Args:
        trainer: the trainer.
        by: the hook that stopped the run; None if no hook did, for example if the loss was not finite.
    """
    if by is None:
        changes = changes_since(trainer._saved_run["config"], trainer.cfg) if trainer._saved_run else {}
        keys = [key for key in changes if key.startswith(_COMPUTATION) and key != "SOLVER.MAX_ITER"]
        return f"{', '.join(keys)} changed" if keys else ""
    hook = trainer._hook_list.by_key().get(by["hook"])
    if hook is None:
        return f"{by['hook']} was removed"
    return "" if arguments_of(hook) == by["arguments"] else f"{by['hook']} has other arguments"


def previous_result(trainer: Any, end: Mapping[str, Any]) -> TrainResult:
    """Log that there is nothing to train, and return the result of the run that had ended.

    If the run was loaded, load the best weights if that run did so.
    """
    cause = ""
    if end["iteration"] < trainer.max_iter:
        cause = f", or change or remove {end['by']['hook']}" if end["by"] else ", or change what the run computes"
    logger.info(
        "Nothing to train: the run ended at iteration %d (%s). To continue, raise %s, now %d%s",
        end["iteration"],
        end["reason"],
        trainer._length_key if trainer._result is None else "trainer.max_iter",
        trainer.max_iter,
        cause,
    )
    if trainer._result is not None:
        return trainer._result
    storage = EventStorage(end["iteration"])
    if trainer._storage_state is not None:
        storage.load_state_dict(trainer._storage_state)
    metrics = {name: value for name, (value, _) in storage.latest().items()}
    result = TrainResult(end["reason"], end["iteration"], metrics)
    for writer in trainer.find_hooks(hooks.PeriodicWriter):
        writer.check_files()
    for hook in trainer.find_hooks(hooks.BestCheckpointer):
        hook.load_best()
    trainer._evaluate_best(result)
    return result


def check_changes_by_hand(trainer: Any) -> None:
    """Use learning rates that were set by hand since the last ``train()``.

    Raises:
        ConfigError: a rate cannot be used, or a config was changed.
    """
    for before, now in zip(trainer._texts_after_train, trainer._texts(), strict=False):
        changes = CfgNode.load_cfg(now).diff(CfgNode.load_cfg(before)) if now != before else {}
        keys = ", ".join(key for key in changes if key.startswith(_BUILT))
        if keys:
            raise ConfigError(
                f"{keys}: was changed between two train() calls, and this trainer was built with the former value. "
                "Change it back; to train on with it, make a new trainer and resume. For the length, set "
                "trainer.max_iter"
            )
    adopt_rates(getattr(trainer, "scheduler", None), trainer._rates)


def check_has_last_weights(trainer: Any) -> None:
    """Raise a ConfigError if the model has the best weights in place of the last ones."""
    for hook in trainer.find_hooks(hooks.BestCheckpointer):
        if hook.loaded_iter is not None:
            raise ConfigError(
                f"CHECKPOINT.LOAD_BEST_AT_END: the model has the weights of iteration {hook.loaded_iter}, and "
                "training cannot continue with them. Make a new trainer, and call resume_or_load(resume=True)"
            )
