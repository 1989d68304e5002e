"""Resumed runs: the config takes precedence over the checkpoint. Runs that have ended, and second calls of ``train()``.

The table of ``docs/checkpoints.md`` lists what a changed key does.
"""

import copy
import logging
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ... import hooks
from ...config import MISSING, CfgNode, ConfigError
from ...config.errors import printable
from ...hooks.common import check_numbers, has_shards, length_of, optimizers_of
from ...hooks.control.lr_scheduler import follow_rates
from ...hooks.evaluation import flatten_names
from .. import comm
from ..checkpoint import unwrap_model
from ..checkpoint.weights import read_checkpoint
from ..setup.seeds import set_seed
from ..solver import LRMultiplier
from ..solver.multi_optimizer import schedulers_of
from ..train_loop import TrainResult
from .lengths import (
    apply_lengths,
    apply_max_iter,
    check_kept_schedules,
    epoch_offset,
    resolve_lengths,
    set_config,
)

__all__ = [
    "apply_changes",
    "changes_since",
    "check_changes",
    "continue_training",
    "continue_without_state",
    "evaluate_best",
    "hyperparameters",
    "kinds",
    "load_optimizer",
    "previous_end",
    "previous_result",
    "run_record",
    "sizes",
    "use_present_weights",
    "use_saved_seed",
    "weights_keys",
]

logger = logging.getLogger(__name__)

# Options of the implementation. load_state_dict() overwrites them, although they depend on the present device.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
# These do not affect what is computed.
_IGNORED = ("OUTPUT_DIR", "MODEL.WEIGHTS", "MODEL.WEIGHTS_FROM", "MODEL.WEIGHTS_STRICT", "VERSION")

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
        "epochs": {"length": trainer._resolved_epoch, "offset": trainer._epoch_offset},
        "results": trainer._last_eval_results,
    }


_SIZES = {"world_size": "process(es)", "samples": "training samples"}


def sizes(data_loader: Any) -> dict[str, int]:
    """Return the numbers of processes and, if it is known, of training samples."""
    samples = length_of(getattr(data_loader, "dataset", None))
    return {"world_size": comm.get_world_size(), **({} if samples is None else {"samples": samples})}


def changes_since(saved: CfgNode, now: CfgNode) -> dict[str, tuple[Any, Any]]:
    """Return the keys that differ between a checkpoint's config and this run's, both read from YAML.

    Returns:
        (old value, new value) by full key, without keys that do not affect training, such as OUTPUT_DIR, and without
        those that the version that wrote the checkpoint did not have.
    """
    pairs = now.diff(saved).items()
    return {key: pair for key, pair in pairs if key not in _IGNORED and pair[0] is not MISSING}


def check_changes(trainer: Any, run: Mapping[str, Any]) -> None:
    """Check that a checkpoint fits a trainer's model, optimizer class and schedule class, before its state is loaded.

    Args:
        trainer: a DefaultTrainer whose model has the checkpoint's weights.
        run: the "run" entry of the checkpoint.

    Raises:
        ConfigError: it does not fit. The message has the remedy.
    """
    path, report = (getattr(trainer.checkpointer, name, None) for name in ("loaded_from", "load_report"))
    path = path or "the checkpoint"  # of fvcore's
    check_numbers(run.get("built", []), trainer._record["built"], f"the optimizer's settings in {path}")
    saved, present = run.get("kinds", {}), kinds(trainer.optimizer, trainer.scheduler, unwrap_model(trainer.model))
    before, now = saved.get("groups", present["groups"]), present["groups"]
    differences = report.differences() if report is not None else []
    tokens = CfgNode.load_cfg(run["config"]).get("DATALOADER", {}).get("MAX_TOKENS", 0) if "config" in run else 0
    if tokens != trainer._resolved.DATALOADER.MAX_TOKENS:
        problem = f"DATALOADER.MAX_TOKENS: {path} counts its position in batches of {tokens} tokens"
    elif differences:
        problem = f"MODEL: the weights in {path} do not fit MODEL.NAME and MODEL.ARGS"
    elif saved.get("optimizer", present["optimizer"]) != present["optimizer"]:
        problem = f"SOLVER.OPTIMIZER.NAME: {path} holds the state of {saved['optimizer']}"
    elif saved.get("scheduler", present["scheduler"]) != present["scheduler"]:
        problem = f"SOLVER.LR_SCHEDULER_NAME: {path} holds the state of {saved['scheduler']}"
    elif before != now and sorted(chain(*before)) == sorted(chain(*now)):  # torch assigns states by position
        problem = (
            f"SOLVER.PARAM_GROUPS: {path} holds the optimizer's state of parameters in other groups (PARAM_GROUPS, "
            "OPTIMIZERS, a factor or decay of biases and norms, or build_optimizer)"
        )
    else:
        return
    message = (
        f"{problem}; to resume, change it back. To start a new run from its weights, leave out --resume and set "
        f"MODEL.WEIGHTS to {path}"
    )
    raise ConfigError("\n".join([message, *differences]))


def apply_changes(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Apply the config where it differs from that of the loaded checkpoint, and log each difference.

    Hyperparameters that hooks or schedules changed during training are kept, if the config has not changed them.

    Args:
        trainer: a DefaultTrainer that has the checkpoint's state.
        saved: the "run" entry of the checkpoint.
    """
    _count_epochs(trainer, saved)
    _keep_length(trainer, saved)
    former, present = CfgNode.load_cfg(saved["config"]), CfgNode.load_cfg(trainer._record["config"])
    changes = changes_since(former, present)
    for key, (before, now) in changes.items():
        logger.warning("Resuming with %s = %r instead of %r", printable(key), now, before)
    for name, unit in _SIZES.items():
        before, now = saved.get(name), trainer._record.get(name)
        if None not in (before, now) and before != now:
            logger.warning("Resuming with %s %s instead of %s", now, unit, before)
    for group, new, old in zip(trainer.optimizer.param_groups, trainer._record["built"], saved["built"], strict=True):
        for key, value in new.items():
            if key in _IMPLEMENTATION or (key != "lr" and old.get(key) != value):
                group[key] = copy.deepcopy(value)
    if not any(key.startswith("SOLVER.") for key in changes):
        return
    for one in schedulers_of(trainer.scheduler):
        if isinstance(one, LRMultiplier):
            follow_rates(one)
            one.base_lrs = [group["initial_lr"] for group in one.optimizer.param_groups]
            one.step(one.last_epoch)
    check_kept_schedules(trainer, former.SOLVER, present.SOLVER)


def _count_epochs(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Compute lengths in epochs anew if the checkpoint's epochs had another length."""
    position = trainer.epoch, trainer._batches.position, trainer._resolved_epoch
    trainer._epoch_offset = epoch_offset(saved.get("epochs", {}), trainer.start_iter, *position)
    if trainer._epoch_offset:
        cfg = resolve_lengths(trainer.given, trainer._resolved_epoch, trainer._epoch_offset)
        trainer.max_iter = cfg.SOLVER.MAX_ITER
        apply_lengths(trainer, cfg)


def _keep_length(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Use the ``max_iter`` that was set while the run trained, unless MAX_ITER or the trainer's own has changed."""
    given, max_iter = saved.get("length", (None, None))
    if given == trainer.given.SOLVER.MAX_ITER and trainer.max_iter == trainer._resolved.SOLVER.MAX_ITER != max_iter:
        logger.info("Resuming with max_iter = %d, which was set during training", max_iter)
        trainer.max_iter = max_iter
        apply_max_iter(trainer)


def weights_keys(cfg: Any) -> dict[str, Any]:
    """Return MODEL.WEIGHTS of a config, and the keys that say how they are read."""
    return {key: value for key, value in cfg.MODEL.items() if key.startswith("WEIGHTS")}


def use_present_weights(trainer: Any) -> None:
    """Use MODEL.WEIGHTS as the config that the trainer was made with has it now: scripts set it afterwards."""
    cfg, before = trainer._weights_of
    for key, value in before.items():
        if cfg.MODEL[key] != value == trainer.cfg.MODEL[key]:  # a value in the trainer's own config has precedence
            trainer.cfg = trainer.cfg.thawed()
            trainer.cfg.MODEL[key] = cfg.MODEL[key]


def use_saved_seed(trainer: Any, resume: bool | str) -> None:
    """Use the saved run's seed if one was drawn before the trainer knew that it resumes."""
    seed = trainer._run.take_saved_seed(resume) if trainer._run is not None else -1
    if seed >= 0:
        cfg, trainer.given = trainer._resolved.clone(), trainer.given.clone()
        set_seed(cfg, seed)
        set_seed(trainer.given, seed)
        set_config(trainer, cfg)
        trainer.reset_data_loader(lambda: trainer.build_train_loader(trainer.cfg))


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
    latest = trainer.storage.latest() if "storage" in vars(trainer) else {}
    metrics = {name: value for name, (value, _) in latest.items()}
    result = TrainResult(end["reason"], end["iteration"], metrics)
    for hook in trainer.find_hooks(hooks.BestCheckpointer):
        hook.load_best()
    evaluate_best(trainer, result)
    return result


def evaluate_best(trainer: Any, result: TrainResult) -> None:
    """Evaluate the best weights if they were loaded, and put their metrics into the result: the last evaluation was of
    other weights."""
    for hook in trainer.find_hooks(hooks.BestCheckpointer):
        if hook.loaded_iter not in (None, result.iteration):
            logger.info("Evaluating the best weights, of iteration %d", hook.loaded_iter)
            result.metrics.update({name: float(value) for name, value in flatten_names(trainer._test()).items()})


# ---------------------------------------------------------------------------- a second train()


def continue_training(trainer: Any) -> None:
    """Have a ``train()`` after another one continue from its end, and use a new ``max_iter``.

    Raises:
        ConfigError: the model has the best weights in place of the last ones.
    """
    for hook in trainer.find_hooks(hooks.BestCheckpointer):
        if hook.loaded_iter is not None:
            raise ConfigError(
                f"CHECKPOINT.LOAD_BEST_AT_END: the model has the weights of iteration {hook.loaded_iter}, and "
                "training cannot continue with them. Make a new trainer, and call resume_or_load(resume=True)"
            )
    if trainer._rng_at_end is not None:
        trainer.start_iter = trainer.finished_iter + 1
        trainer._pending_rng = trainer._rng_at_end
    if trainer._record and trainer.max_iter != trainer._resolved.SOLVER.MAX_ITER:
        apply_max_iter(trainer)


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
        settings = hyperparameters(one)
        try:
            one.load_state_dict(other)
            for parameter, values in one.state.items():
                shapes = {tuple(value.shape) for value in values.values() if isinstance(value, torch.Tensor)}
                if shapes - {(), tuple(parameter.shape)}:
                    raise ValueError(f"it has {shapes} for a parameter of {tuple(parameter.shape)}")
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{key}: the optimizer in {path} does not fit {type(one).__name__}: {error}") from error
        for group, values in zip(one.param_groups, settings, strict=True):
            group.update(values)
    logger.info("Loaded the optimizer's state from %s", path)
