"""Resumed runs: the config takes precedence over the checkpoint. Runs that have ended, and second calls of ``train()``.

The table of ``docs/checkpoints.md`` lists what a changed key does.
"""

import copy
import logging
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ... import hooks
from ...config import CfgNode, ConfigError
from ...config.errors import printable
from ...hooks.common.models import optimizers_of
from ...hooks.common.tensors import has_shards
from ...hooks.event_storage import EventStorage
from .. import comm
from ..checkpoint import unwrap_model
from ..checkpoint.weights import read_checkpoint
from ..solver import LRMultiplier
from ..solver.several import schedulers_of
from ..train_loop import TrainResult
from .lengths import check_length, rebuild_schedule, set_rates

__all__ = [
    "apply_changes",
    "changes_since",
    "check_changes",
    "check_changes_by_hand",
    "check_has_last_weights",
    "continue_without_state",
    "hyperparameters",
    "kinds",
    "load_optimizer",
    "previous_end",
    "previous_result",
    "rates_of",
    "run_record",
]

logger = logging.getLogger(__name__)

# Options of the implementation. load_state_dict() overwrites them, although they depend on the present device.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
# These do not affect what is computed.
_IGNORED = ("OUTPUT_DIR", "MODEL.WEIGHTS", "MODEL.WEIGHTS_FROM", "MODEL.WEIGHTS_STRICT", "VERSION")
# Keys that are read when the trainer is built.
_BUILT = ("SOLVER.", "MODEL.", "DATASETS.TRAIN", "DATALOADER.", "SEED")
# Keys that may change a schedule.
_SCHEDULE = ("SOLVER.BASE_LR", "SOLVER.MAX_ITER", "SOLVER.LR_SCHEDULER_ARGS", "SOLVER.OPTIMIZERS")

# ---------------------------------------------------------------------------- another config


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


def run_record(trainer: Any) -> dict[str, Any]:
    """Return the "run" entry of a DefaultTrainer's checkpoint: what a resume with another config needs."""
    return {
        **trainer._record,
        "kinds": kinds(trainer.optimizer, trainer.scheduler, unwrap_model(trainer.model)),
        "epochs": {"length": trainer.iters_per_epoch, "offset": trainer._epoch_offset},
        "results": trainer._last_eval_results,
        **_sizes(trainer),
    }


_SIZES = {"world_size": "process(es)", "samples": "training samples"}


def _sizes(trainer: Any) -> dict[str, int]:
    sizes = {"world_size": comm.get_world_size()}
    with suppress(AttributeError, TypeError, NotImplementedError):  # a stream has no length
        sizes["samples"] = len(trainer.data_loader.dataset)
    return sizes


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


def check_changes(trainer: Any, run: Mapping[str, Any]) -> None:
    """Check that a checkpoint fits a trainer's model, optimizer class and schedule class, before its state is loaded.

    Args:
        trainer: a DefaultTrainer whose model has the checkpoint's weights.
        run: the "run" entry of the checkpoint.

    Raises:
        ConfigError: it does not fit. The message has the remedy.
    """
    path, report = (getattr(trainer.checkpointer, name, None) for name in ("loaded_from", "load_report"))
    saved, present = run.get("kinds", {}), kinds(trainer.optimizer, trainer.scheduler, unwrap_model(trainer.model))
    instead = f"To start a new run from its weights, leave out --resume and set MODEL.WEIGHTS to {path}"
    if report and report.differences():  # fvcore's Checkpointer has no report
        raise ConfigError(
            f"MODEL: the weights in {path} do not fit {trainer.cfg.MODEL.NAME} with these MODEL.ARGS; to resume, "
            f"change them back. {instead}.\n" + "\n".join(report.differences())
        )
    for kind, key in (("optimizer", "SOLVER.OPTIMIZER.NAME"), ("scheduler", "SOLVER.LR_SCHEDULER_NAME")):
        if saved.get(kind, present[kind]) != present[kind]:
            raise ConfigError(
                f"{key}: {path} holds the state of {saved[kind]}, which {present[kind]} cannot load; to resume, change "
                f"it back{f' to {saved[kind]}' if kind == 'optimizer' else ''}. {instead}"
            )
    before, now = saved.get("groups", present["groups"]), present["groups"]
    if before != now and sorted(chain(*before)) == sorted(chain(*now)):  # torch assigns states by position
        raise ConfigError(
            f"SOLVER.PARAM_GROUPS: {path} holds the optimizer's state of parameters in other groups; to resume, change "
            "back what groups them (PARAM_GROUPS, LAYER_DECAY, OPTIMIZERS, a factor or decay of biases and norms, or "
            f"build_optimizer). {instead}"
        )


def apply_changes(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Apply the config where it differs from that of the loaded checkpoint, and log each difference.

    Hyperparameters that hooks or schedules changed during training are kept, if the config has not changed them.

    Args:
        trainer: a DefaultTrainer that has the checkpoint's state.
        saved: the "run" entry of the checkpoint.
    """
    changes = changes_since(saved["config"], trainer.cfg)
    for key, (before, now) in changes.items():
        logger.warning("Resuming with %s = %r instead of %r", printable(key), now, before)
    for name, now in _sizes(trainer).items():
        if (before := saved.get(name, now)) != now:
            logger.warning("Resuming with %s %s instead of %s", now, _SIZES[name], before)
    for group, new, old in zip(trainer.optimizer.param_groups, trainer._record["built"], saved["built"], strict=True):
        for key, value in new.items():
            if key in _IMPLEMENTATION or (key != "lr" and old.get(key) != value):
                group[key] = copy.deepcopy(value)
    if not any(key.startswith("SOLVER.") for key in changes):
        return
    for one in schedulers_of(trainer.scheduler):
        if isinstance(one, LRMultiplier):
            one.base_lrs = [group["initial_lr"] for group in one.optimizer.param_groups]
            set_rates(one)
    if any(key.startswith(_SCHEDULE) for key in changes):
        former = schedulers_of(trainer.scheduler)
        rebuild_schedule(trainer, trainer.cfg)
        check_length(trainer, changes.get("SOLVER.MAX_ITER", (trainer.max_iter,))[0])
        for one in schedulers_of(trainer.scheduler):
            if any(one is kept for kept in former):
                logger.warning("%s keeps the checkpoint's schedule", type(one).__name__)


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


# ---------------------------------------------------------------------------- runs that have ended


def previous_end(trainer: Any) -> Mapping[str, Any] | None:
    """Return how the run ended, unless MAX_ITER is larger than it was then. See :meth:`TrainerBase._end`."""
    end: Mapping[str, Any] | None = trainer._loaded_end
    if trainer._result is not None and end is None:  # trained by this trainer: only a complete run has ended
        end = trainer._end() if trainer.finished_iter + 1 >= trainer.max_iter else None
        return None if end is None else {**end, "complete": True}
    return None if end is None or trainer.max_iter > end["max_iter"] else end


def previous_result(trainer: Any, end: Mapping[str, Any]) -> TrainResult:
    """Log that there is nothing to train, and return the result of the run that had ended.

    If the run was loaded, load the best weights if that run did so.
    """
    logger.info(
        "Nothing to train: the run ended at iteration %d (%s). To continue, raise %s above %d",
        end["iteration"],
        end["reason"],
        trainer._length_key if trainer._result is None else "trainer.max_iter",
        max(trainer.max_iter, end["max_iter"]),
    )
    if trainer._result is not None:
        return trainer._result
    storage = EventStorage(end["iteration"])
    if trainer._storage_state is not None:
        storage.load_state_dict(trainer._storage_state)
    metrics = {name: value for name, (value, _) in storage.latest().items()}
    result = TrainResult(end["reason"], end["iteration"], metrics)
    for hook in trainer.find_hooks(hooks.BestCheckpointer):
        hook.load_best()
    trainer._evaluate_best(result)
    return result


# ---------------------------------------------------------------------------- a second train()


def rates_of(optimizer: Any) -> list[float]:
    """Return the present learning rate of each parameter group."""
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


def check_changes_by_hand(trainer: Any) -> None:
    """Use learning rates that were set by hand since the last ``train()``, or the constructor.

    Raises:
        ConfigError: a rate cannot be used, since the schedule sets it in each step, or a config was changed.
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
    if not trainer._rates:  # a subclass that does not call __init__
        return
    rates = {id(group): lr for group, lr in zip(trainer.optimizer.param_groups, trainer._rates, strict=False)}
    for one in schedulers_of(trainer.scheduler):
        groups = getattr(one, "optimizer", trainer.optimizer).param_groups
        for index, group in enumerate(groups if not isinstance(one, ReduceLROnPlateau) else ()):
            before, now = rates.get(id(group)), float(group["lr"])
            if before in (None, now):
                continue
            if not isinstance(one, LRMultiplier) or before != float(group["initial_lr"]):
                raise ConfigError(
                    f"optimizer.param_groups: the learning rate was set to {now:g}, but the schedule sets it in each "
                    f"step (now {before:g}). Set it back; for another rate, make a new trainer with that "
                    "SOLVER.BASE_LR (Trainer: lr), and resume"
                )
            one.base_lrs[index] = group["initial_lr"] = now
            logger.info(
                "The learning rate was set to %g instead of %g: it is the schedule's base rate now", now, before
            )


def check_has_last_weights(trainer: Any) -> None:
    """Raise a ConfigError if the model has the best weights in place of the last ones."""
    for hook in trainer.find_hooks(hooks.BestCheckpointer):
        if hook.loaded_iter is not None:
            raise ConfigError(
                f"CHECKPOINT.LOAD_BEST_AT_END: the model has the weights of iteration {hook.loaded_iter}, and "
                "training cannot continue with them. Make a new trainer, and call resume_or_load(resume=True)"
            )


# ---------------------------------------------------------------------------- a new run with another run's optimizer


def load_optimizer(optimizer: Any, model: Any, path: str) -> None:
    """Load an optimizer's state, such as momentum, from a checkpoint. Learning rates and other settings stay.

    Args:
        optimizer: the optimizer, or an OptimizerList.
        model: its model.
        path: a local checkpoint of a trainer.

    Raises:
        ConfigError: the file has no state of an optimizer, or one that does not fit.
    """
    key = "MODEL.WEIGHTS_OPTIMIZER"
    if has_shards(model):
        raise ConfigError(f"{key}: is not supported for sharded models")
    state = read_checkpoint(path).get("trainer", {}).get("optimizer")
    if state is None:
        raise ConfigError(f"{key}: {path} has weights only, and no state of an optimizer")
    own, saved = optimizers_of(optimizer), state.get("optimizers", [state])
    if len(own) != len(saved):
        raise ConfigError(f"{key}: {path} has {len(saved)} optimizers, and this run {len(own)}")
    for one, other in zip(own, saved, strict=True):
        groups = one.state_dict()["param_groups"]
        parameters = [parameter for group in one.param_groups for parameter in group["params"]]
        before, now = ([len(group["params"]) for group in g] for g in (other["param_groups"], groups))
        fits = before == now and all(
            not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape == parameters[index].shape
            for index, values in other["state"].items()
            for value in values.values()
        )
        if not fits:
            raise ConfigError(
                f"{key}: the optimizer in {path} is of other parameters: its groups have {before} of them, and those "
                f"of {type(one).__name__} {now}, or shapes differ"
            )
        try:
            one.load_state_dict({"state": other["state"], "param_groups": groups})
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{key}: the optimizer in {path} does not fit {type(one).__name__}: {error}") from error
    logger.info("Loaded the optimizer's state from %s", path)
