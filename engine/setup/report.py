"""What a run says about itself: its environment, config, data, model and results, and how to go on."""

import logging
import os
import platform
import re
import shlex
import sys
from typing import Any

import torch

import hookline

from ...config import CfgNode, ConfigError, Duration, get_cfg, name_of
from ...config.atomic import shown_path
from ...config.values import MISSING
from ...config.yaml_files import find_config
from ...hooks.base import EVENTS
from ...hooks.builtin.interruption import is_session
from ...hooks.common import length_of, unwrap_model
from ...hooks.evaluation import fit_names
from ...hooks.hook_list import hook_name, overrides
from .. import comm
from ..evaluation import format_results
from ..modeling.summary import model_summary
from ..run_end import TrainResult
from ..solver.lengths import ConfiguredTrainer

logger = logging.getLogger(__name__)


_LENGTHS = ("SOLVER.WARMUP_ITERS", "SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD", "LOG.PERIOD")


def describe_environment() -> str:
    """Return versions and the device in one line."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {device}, {platform.node()}"


def describe_config(cfg: CfgNode) -> str:
    """Return the keys that differ from the defaults, one per line."""
    lines = [f"  {key} = {value!r}" for key, (_, value) in cfg.diff(get_cfg()).items() if value is not MISSING]
    return "\n".join(lines) or "  nowhere"


def log_setup(cfg: CfgNode, config_file: str) -> None:
    """Log versions, the command line, and what differs from the defaults."""
    logger.info("hookline %s, %s", hookline.__version__, describe_environment())
    logger.debug("Command line: %s", " ".join(sys.argv))
    if config_file:
        logger.info("Config file: %s", find_config(config_file))
    if comm.get_world_size() > 1:
        wanted, actual = Duration.parse_time(cfg.PARALLEL.TIMEOUT).seconds, comm.timeout().total_seconds()
        if wanted != actual:
            message = "PARALLEL.TIMEOUT is %g s, but the ranks were launched with %g s: pass timeout= to launch()"
            logger.warning(message, wanted, actual)
    if comm.is_main_process():
        logger.debug("Config, where it differs from the defaults:\n%s", describe_config(cfg))


def _data(trainer: ConfiguredTrainer) -> str:
    """Return the training data and its size, and the names of the test data."""
    cfg, loader = trainer.cfg, getattr(trainer, "data_loader", None)  # an inner trainer may have it
    text = ", ".join(map(name_of, cfg.DATASETS.TRAIN)) or "data of build_train_loader()"
    if (size := length_of(getattr(loader, "dataset", None))) is not None:
        text += f" ({size:,} samples)"
    if trainer.iters_per_epoch:
        text += f", {trainer.iters_per_epoch:,} iterations an epoch"
    if cfg.DATASETS.TEST:
        text += f"; tested on {', '.join(map(name_of, cfg.DATASETS.TEST))}"
    return re.sub(r"<object [^>]*?(\w+)>", r"\1", text)  # an object's class


def describe_run(trainer: ConfiguredTrainer) -> str:
    """Return what ``--dry-run`` prints: a DefaultTrainer's config, model, lengths, periods and hooks."""
    parts = {
        "Config, where it differs from the defaults": describe_config(trainer.cfg),
        "Model": model_summary(trainer.model),
        "Lengths and periods": _lengths(trainer),
        "Hooks, in the order they are called in, and the events they listen to": _hooks(trainer),
    }
    return "\n".join(f"{title}:\n{text}" for title, text in parts.items())


def _hooks(trainer: ConfiguredTrainer) -> str:
    lines = [
        f"  {number:>2}  {hook_name(hook):<24} {', '.join(event for event in EVENTS if overrides(hook, event))}"
        for number, hook in enumerate(trainer.hooks.hooks)
    ]
    return "\n".join(lines) or "  none"


def _lengths(trainer: ConfiguredTrainer) -> str:
    values, epoch = trainer.cfg.flatten(), trainer.iters_per_epoch
    lines = [f"  epoch: {epoch} iterations" if epoch else "  epoch: of unknown length"]
    lines += [f"  SOLVER.MAX_ITER: {trainer.max_iter} iterations"]
    lines += [f"  {key}: {values[key] or 'never'}" for key in _LENGTHS]
    return "\n".join(lines)


def log_start(trainer: ConfiguredTrainer, again: bool = False) -> None:
    """Log data, model and length of a DefaultTrainer's run; its hooks and layers only to log.txt.

    Args:
        trainer: the trainer.
        again: its model and data were logged before.
    """
    if not again:
        logger.info("Data: %s", _data(trainer))
        model = unwrap_model(trainer.model)
        layers = model_summary(model)
        logger.info("Model: %s, parameters: %s", type(model).__name__, layers.splitlines()[-1].split(maxsplit=2)[2])
        logger.debug("Layers:\n%s", layers)
        logger.debug("Hooks: %s", ", ".join(hook_name(hook) for hook in trainer.hooks.hooks))
    length, epochs = trainer.iters_per_epoch, ""
    if length:
        offset = 0 if trainer.lengths is None else trainer.lengths.offset
        epochs = f" ({(trainer.max_iter - offset) / length:.4g} epochs)"
    data, device = trainer.cfg.DATALOADER, trainer.device or trainer.device_type
    own = getattr(getattr(trainer, "data_loader", None), "batch_size", None)  # of a loader of build_train_loader()
    samples = own * comm.get_data_size() if own else data.BATCH_SIZE
    size = f"at most {data.MAX_TOKENS:,} tokens" if data.MAX_TOKENS else f"{samples} samples"
    logger.info("Training for %d iterations%s, %s each, on %s", trainer.max_iter, epochs, size, device)


def log_end(trainer: ConfiguredTrainer, result: TrainResult) -> None:
    """Log the results, the best checkpoint, and how to resume a run that stopped early."""
    if not comm.is_main_process():
        return
    if trainer.last_eval_results:
        logger.info("Results:\n%s", format_results(trainer.last_eval_results))
    if trainer.current_run is None or trainer.current_run.kind == "trial":
        return
    for hook in trainer.find_hooks("BestCheckpointer")[:1]:
        if hook.best:
            names = hook._val_metric, _path(trainer.cfg, "model_best.pth")
            text = f"Best {{}}: {hook.best_metric:.5g} at iteration {hook.best_iter}, in {{}}"
            logger.info("%s", text.format(*names), extra={"console": fit_names(text, *names)})
    if result.reason != "completed":
        again = "trainer.train()" if is_session() else "the same script with trainer.train(resume=True)"
        is_command = hasattr(trainer.current_run.args, "opts")
        logger.info("To resume: %s", "the same command with --resume" if is_command else again)


def _path(cfg: CfgNode, name: str) -> str:
    return shown_path(os.path.join(cfg.OUTPUT_DIR, name))


def name_replay(trainer: ConfiguredTrainer, error: BaseException) -> None:
    """Add to an error of a step the command that repeats the step, if there is one, or how to go on."""
    if trainer.failed:
        return
    trained = trainer.finished_iter >= trainer.start_iter
    if isinstance(error, ConfigError) and trained:
        error.add_note("steps were trained before: when it is mended, continue with --resume, or train(resume=True)")
    if trainer.current_run is not None and trainer.current_run.moved and not trained:
        error.add_note(f"the earlier run in the folder is now in {trainer.current_run.moved}")
    iteration = int(getattr(error, "found_in_step", trainer.iter))  # an error may be found after its step
    of_a_step = isinstance(error, Exception) and not isinstance(error, ConfigError)
    if of_a_step and (command := trainer.replay_command(iteration)):
        error.add_note(f"look at this step: {command}")


def replay_command(trainer: ConfiguredTrainer, iteration: int) -> str:
    """Return the command that repeats a step; empty if the run has no such step, or was not started by ``run()``."""
    args: Any = getattr(trainer.current_run, "args", None)
    cfg = trainer.cfg
    if not getattr(args, "handled", False) or iteration >= trainer.max_iter or cfg.FAST_DEV_RUN:
        return ""
    if hasattr(args, "trainer"):  # the command hookline
        own = ["--trainer", args.trainer] if args.trainer else []
        return shlex.join(["hookline", "replay", shown_path(cfg.OUTPUT_DIR), "--iter", str(iteration), *own])
    config = _path(cfg, "config.yaml")
    return shlex.join(["python", sys.argv[0], "--config-file", config, "--replay", str(iteration)])
