"""A resume with another config: what a checkpoint says of its run, and what is done where this run differs.

The config takes precedence over the checkpoint. A list in ``docs/checkpoints.md`` says what a changed key does.
"""

import inspect
import logging
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..config import CfgNode, ConfigError
from ..config.errors import printable
from ..config.values import MISSING, same
from ..hooks.common import length_of, optimizers_of, plain_name, schedulers_of, unwrap_model
from . import comm
from .setup.seeds import set_seed
from .solver import LRMultiplier
from .solver.lengths import ConfiguredTrainer, apply_lengths, apply_max_iter, check_kept_schedules
from .solver.schedules import resolve_lengths

logger = logging.getLogger(__name__)

# These keys do not affect what is computed.
_IGNORED = ("OUTPUT_DIR", "MODEL.WEIGHTS", "MODEL.WEIGHTS_FROM", "MODEL.WEIGHTS_STRICT", "VERSION")
_SIZES = {"world_size": "process(es)", "samples": "training samples"}


def run_record(trainer: ConfiguredTrainer) -> dict[str, Any]:
    """Return the "run" entry of a DefaultTrainer's checkpoint: what a resume with another config needs."""
    lengths = trainer.lengths
    return {
        **{"config": lengths.text, "length": lengths.changed, **_sizes(trainer.data_loader)},
        "kinds": _kinds(trainer.optimizer, trainer.scheduler, unwrap_model(trainer.model)),
        "epochs": {"length": lengths.iters_per_epoch, "offset": lengths.offset},
        "results": trainer.last_eval_results,
    }


def _sizes(data_loader: Any) -> dict[str, int]:
    """Return the numbers of processes and, if it is known, of training samples."""
    samples = length_of(getattr(data_loader, "dataset", None))
    return {"world_size": comm.get_world_size(), **({} if samples is None else {"samples": samples})}


def _kinds(optimizer: Any, scheduler: Any, model: nn.Module) -> dict[str, Any]:
    """Return the class names of optimizer and scheduler, and the parameters' names by group. Their states fit only
    the same ones."""
    names = [type(one).__name__ for one in optimizers_of(optimizer)]
    schedules = [type(one).__name__ for one in schedulers_of(scheduler)]
    name_of = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    groups = [[name_of.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]
    return {"optimizer": ", ".join(names), "scheduler": ", ".join(schedules), "groups": groups}


def check_fits(trainer: ConfiguredTrainer, run: Mapping[str, Any], config: CfgNode) -> None:
    """Check that a checkpoint fits a trainer's model, optimizer and schedule, before its state is loaded.

    Args:
        trainer: a DefaultTrainer whose model has the checkpoint's weights.
        run: the "run" entry of the checkpoint.
        config: the config in it.

    Raises:
        ConfigError: it does not fit. The message has the remedy.
    """
    path, report = (getattr(trainer.checkpointer, name, None) for name in ("loaded_from", "load_report"))
    path = path or "the checkpoint"  # of fvcore's
    saved, present = run.get("kinds", {}), _kinds(trainer.optimizer, trainer.scheduler, unwrap_model(trainer.model))
    before, now = saved.get("groups", present["groups"]), present["groups"]
    differences = report.differences() if report is not None else []
    tokens = config.get("DATALOADER", {}).get("MAX_TOKENS", 0)
    if tokens != trainer.lengths.cfg.DATALOADER.MAX_TOKENS:
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


def use_saved_seed(trainer: ConfiguredTrainer, config: CfgNode) -> None:
    """Use a checkpoint's seed if this run has drawn one before it was known that it resumes."""
    run, lengths, seed = trainer.current_run, trainer.lengths, config.get("SEED", -1)
    if run is None or not run.drew_seed or seed in (-1, lengths.cfg.SEED):
        return
    lengths.cfg, lengths.user_cfg = lengths.cfg.clone(), lengths.user_cfg.clone()
    trainer.cfg = trainer.cfg.thawed()
    for cfg in (lengths.cfg, lengths.user_cfg, trainer.cfg):
        set_seed(cfg, seed)
    lengths.use(lengths.cfg)
    run.use_seed(seed)
    trainer.reset_data_loader(lambda: trainer.build_train_loader(trainer.cfg))


def settings(trainer: ConfiguredTrainer) -> list[dict[str, Any]]:
    """Return the settings of each of the optimizer's groups: the arguments of its constructor.

    Other entries of a group, such as a counter, are state. So are the learning rate, and what a schedule of torch
    with ``cycle_momentum`` sets. "initial_lr" is the base rate of the schedule.
    """
    state = {"params", "lr"}
    if any(getattr(one, "cycle_momentum", False) for one in schedulers_of(trainer.scheduler)):
        state |= {"momentum", "betas"}
    found = []
    for optimizer in optimizers_of(trainer.optimizer):
        wrapped = [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]  # as by Lookahead
        classes = {cls for one in (optimizer, *wrapped) for cls in type(one).__mro__[:-1]}
        constructors = [vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)]
        names = {name for one in constructors for name in inspect.signature(one).parameters} - state | {"initial_lr"}
        for group in optimizer.param_groups:
            found.append({name: group[name] for name in names & group.keys()})
    return found


def apply_config(
    trainer: ConfiguredTrainer, run: Mapping[str, Any], config: CfgNode, built: list[dict[str, Any]]
) -> None:
    """Apply this run's config where it differs from that of the loaded checkpoint, and log each difference.

    Args:
        trainer: a DefaultTrainer that has the checkpoint's state.
        run: the "run" entry of the checkpoint.
        config: the config in it.
        built: :func:`settings` before the state was loaded.
    """
    _use_saved_lengths(trainer, run)
    present = trainer.lengths.cfg
    # Without keys that the version which wrote the checkpoint did not have.
    pairs = {key: pair for key, pair in present.diff(config).items() if key not in _IGNORED and pair[0] is not MISSING}
    for key, (before, now) in pairs.items():
        logger.warning("Resuming with %s = %r instead of %r", printable(key), now, before)
    for name, now in _sizes(trainer.data_loader).items():
        if run.get(name, now) != now:
            logger.warning("Resuming with %s %s instead of %s", now, _SIZES[name], run[name])
    base_rates: dict[int, Any] = {}
    differing: dict[str, tuple[Any, Any]] = {}
    for group, values in zip(trainer.optimizer.param_groups, built, strict=True):
        base_rates[id(group)] = values.pop("initial_lr", group["lr"])
        before = {name: group.get(name) for name in values}
        differing |= {name: (now, before[name]) for name, now in values.items() if not same(now, before[name])}
        group.update(values)
    for name, (now, before) in differing.items():
        logger.warning("Resuming with the optimizer's %s = %r instead of %r", name, now, before)
    if not any(key.startswith("SOLVER.") for key in pairs):
        return
    for one in schedulers_of(trainer.scheduler):
        if isinstance(one, LRMultiplier):  # built from this run's config; only its position is the checkpoint's
            for group in one.optimizer.param_groups:
                group["initial_lr"] = base_rates[id(group)]
            one.base_lrs = [group["initial_lr"] for group in one.optimizer.param_groups]
            one.step(one.last_epoch)
    check_kept_schedules(trainer, config.SOLVER, present.SOLVER)


def _use_saved_lengths(trainer: ConfiguredTrainer, run: Mapping[str, Any]) -> None:
    """Compute lengths in epochs again if the checkpoint's epochs had another length. Use the ``max_iter`` that was set
    while the run trained, unless MAX_ITER or the trainer's own has changed."""
    lengths, saved = trainer.lengths, run.get("epochs", {})
    before, now = saved.get("length"), lengths.iters_per_epoch
    lengths.offset = saved.get("offset", 0)
    if before and now and before != now:
        lengths.offset = trainer.finished_iter + 1 - trainer.epoch * now - trainer.batches.position
    if lengths.offset:
        cfg = resolve_lengths(lengths.user_cfg, now, lengths.offset)
        trainer.max_iter = cfg.SOLVER.MAX_ITER
        apply_lengths(trainer, cfg)
    length: Any = run.get("length") or (None, None)
    given, max_iter = length
    if given == lengths.user_cfg.SOLVER.MAX_ITER and trainer.max_iter == lengths.cfg.SOLVER.MAX_ITER != max_iter:
        logger.info("Resuming with max_iter = %d, which was set during training", max_iter)
        trainer.max_iter = max_iter
        apply_max_iter(trainer)
