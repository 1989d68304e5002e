"""What a run says about itself: its environment, config, data, model and results, and how to go on."""

import logging
import os
import platform
import shlex
import sys
from importlib.util import find_spec
from typing import Any

import torch

from ...config import MISSING, CfgNode, ConfigError, Duration, component, get_cfg, name_of
from ...config.errors import first_line
from ...config.files.atomic import shown_path
from ...config.files.run_folder import claim
from ...hooks.common.models import unwrap_model
from ...hooks.hook_list import hook_name
from .. import comm
from ..evaluation import format_results
from ..modeling import model_summary
from ..train_loop import TrainResult

__all__ = [
    "describe_config",
    "describe_environment",
    "describe_run",
    "draw_at_end",
    "log_end",
    "log_start",
    "name_replay",
    "replay_command",
]

logger = logging.getLogger(__name__)

LEAST_SECONDS = 60.0
"""How long a run trains at least for a picture with "auto": importing matplotlib and drawing take 1 to 2 s."""
_PERIODS = ("SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD", "LOG.PERIOD")


def describe_environment() -> str:
    """Return versions and the device in one line."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {device}, {platform.node()}"


def describe_config(cfg: CfgNode) -> str:
    """Return the keys that differ from the defaults, one per line."""
    lines = [f"  {key} = {value!r}" for key, (_, value) in cfg.diff(get_cfg()).items() if value is not MISSING]
    return "\n".join(lines) or "  nowhere"


def _data(trainer: Any) -> str:
    """Return the training data and its size, and the names of the test data with the sizes that are known."""
    cfg = trainer.cfg
    train = ", ".join(name_of(entry) for entry in cfg.DATASETS.TRAIN) or "data of build_train_loader()"
    size = _size(getattr(getattr(trainer, "data_loader", None), "dataset", None))  # an inner trainer may have it
    epoch = f", {trainer.iters_per_epoch:,} iterations an epoch" if trainer.iters_per_epoch else ""
    tests = [f"{name_of(entry)}{_size(getattr(component(entry)[0], 'value', None))}" for entry in cfg.DATASETS.TEST]
    return f"{train}{size}{epoch}" + (f"; tested on {', '.join(tests)}" if tests else "")


def _size(data: Any) -> str:
    try:
        return f" ({len(data):,} samples)"
    except TypeError:  # None, or an iterable data set
        return ""


def describe_run(trainer: Any) -> str:
    """Return what ``--dry-run`` prints: a DefaultTrainer's config, model, lengths, periods and hooks."""
    parts = {
        "Config, where it differs from the defaults": describe_config(trainer.cfg),
        "Model": model_summary(trainer.model),
        "Lengths and periods": _lengths(trainer),
        "Hooks, in the order they are called in, and the events they listen to": trainer.describe_hooks(),
    }
    return "\n".join(f"{title}:\n{text}" for title, text in parts.items())


def _lengths(trainer: Any) -> str:
    cfg, epoch = trainer.cfg, trainer.iters_per_epoch
    lines = [f"  epoch: {epoch} iterations" if epoch else "  epoch: of unknown length"]
    lines += [f"  SOLVER.MAX_ITER: {trainer.max_iter} iterations", f"  SOLVER.WARMUP_ITERS: {cfg.SOLVER.WARMUP_ITERS}"]
    if "MultiStep" in cfg.SOLVER.LR_SCHEDULER_NAME:
        lines.append(f"  SOLVER.STEPS: {cfg.SOLVER.STEPS}")
    for key in _PERIODS:
        section, name = key.split(".")
        lines.append(f"  {key}: {_period(Duration.parse(cfg[section][name]), epoch)}")
    return "\n".join(lines)


def _period(period: Duration, epoch: int | None) -> str:
    if not period:
        return "never"
    if period.unit == "s" or (period.unit == "ep" and not epoch):
        return f"every {period}"
    return f"every {period.iterations(epoch)} iterations"


def log_start(trainer: Any, length: str, first: bool) -> None:
    """Log data, length, hooks and model of a run.

    Args:
        trainer: a DefaultTrainer.
        length: of the run, as text.
        first: whether the trainer has not trained before.
    """
    if first:
        logger.info("Data: %s", _data(trainer))
        logger.info("Model:\n%s", model_summary(unwrap_model(trainer.model)))
        logger.info("Hooks: %s", ", ".join(hook_name(hook) for hook in trainer._hooks))
    samples, device = trainer.cfg.DATALOADER.BATCH_SIZE, trainer.device or trainer._device_type()
    logger.info("Training for %s, %d samples each, on %s", length, samples, device)


def log_end(trainer: Any, result: TrainResult) -> None:
    """Log the results, the best checkpoint, and how to go on."""
    if not comm.is_main_process():
        return
    if trainer._last_eval_results:
        logger.info("Results:\n%s", format_results(trainer._last_eval_results))
    if trainer._start is None or trainer._start.kind == "trial":
        return
    for hook in trainer.find_hooks("BestCheckpointer")[:1]:
        if hook.best:
            path = _path(trainer.cfg, "model_best.pth")
            where = f"at iteration {hook.best_iter}, in {path}"
            logger.info("Best %s: %.5g %s", hook._val_metric, hook.best_metric, where)
    logger.info("Next:\n%s", _next_steps(trainer, result))


def _next_steps(trainer: Any, result: TrainResult) -> str:
    cfg, longer, args = trainer.cfg, 2 * max(trainer.max_iter, result.iteration), trainer._start.args
    if not hasattr(args, "opts"):  # not a command
        on = "trainer.train()" if result.exit_code else f"trainer.max_iter = {longer}; trainer.train()"
        evaluate = "trainer.evaluate()"
    else:
        on = "the same command with --resume" + ("" if result.exit_code else f" SOLVER.MAX_ITER {longer}")
        files = [_path(cfg, name) for name in ("model_best.pth", "model_final.pth")]
        weights = " ".join(("MODEL.WEIGHTS", shlex.quote(next(filter(os.path.exists, files), ""))))
        evaluate = f"the same command with --eval-only {weights}"
        if hasattr(args, "trainer"):
            evaluate = f"hookline eval --config-file {shlex.quote(_path(cfg, 'config.yaml'))} {weights}"
    steps = f"  {'resume:' if result.exit_code else 'train longer:':13} {on}"
    return f"{steps}\n  evaluate:     {evaluate}" if cfg.DATASETS.TEST and not evaluate.endswith("''") else steps


def _path(cfg: CfgNode, name: str) -> str:
    return shown_path(os.path.join(cfg.OUTPUT_DIR, name))


def name_replay(trainer: Any, error: BaseException) -> None:
    """Add to an error of a step the command that repeats the step, if there is one."""
    iteration = getattr(error, "found_in_step", trainer.iter)  # an error may be found after its step
    of_a_step = isinstance(error, Exception) and not isinstance(error, ConfigError)
    if of_a_step and (command := trainer.replay_command(iteration)):
        error.add_note(f"look at this step: {command}")


def replay_command(trainer: Any, iteration: int) -> str:
    """Return the command that repeats a step; empty if the run has no such step, or was not started by ``run()``."""
    args: Any = getattr(trainer._start, "args", None)
    cfg = trainer.cfg
    if not getattr(args, "handled", False) or iteration >= trainer.max_iter or cfg.FAST_DEV_RUN:
        return ""
    if hasattr(args, "trainer"):  # the command hookline
        own = ["--trainer", args.trainer] if args.trainer else []
        return shlex.join(["hookline", "replay", shown_path(cfg.OUTPUT_DIR), "--iter", str(iteration), *own])
    config = _path(cfg, "config.yaml")
    return shlex.join(["python", sys.argv[0], "--config-file", config, "--replay", str(iteration)])


def draw_at_end(cfg: CfgNode, seconds: float) -> None:
    """Draw ``curves.png`` into the folder of a run. A picture that cannot be drawn is logged, and not an error.

    Args:
        cfg: the full config.
        seconds: how long the process has trained.
    """
    setting, folder = cfg.LOG.CURVES, cfg.OUTPUT_DIR
    if not setting or cfg.FAST_DEV_RUN or not comm.is_main_process():
        return
    if setting == "auto" and seconds < LEAST_SECONDS:
        return
    if setting == "auto" and os.environ.get("CI"):
        logger.info('LOG.CURVES: curves.png is not drawn, since the environment variable CI is set ("auto")')
        return
    from ...runs.figure import NO_MATPLOTLIB, write_curves
    from ...runs.reading import read_run

    if find_spec("matplotlib") is None:
        logger.info("LOG.CURVES: curves.png is not drawn: %s", NO_MATPLOTLIB)
        return
    path = os.path.join(folder, "curves.png")
    try:
        run = read_run(folder)
        claim(path)
        write_curves([run], path)
    except Exception as error:
        logger.warning("LOG.CURVES: curves.png is not drawn: %s", first_line(error))
    else:
        logger.info("Curves: %s", path)
