"""Text about a run: environment, config, lengths, hooks."""

import platform
from typing import Any

import torch

from ...config import MISSING, CfgNode, Duration, component, get_cfg, name_of
from ..modeling import model_summary

__all__ = ["describe_config", "describe_data", "describe_environment", "describe_run"]

_PERIODS = ("SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD", "LOG.PERIOD")


def describe_environment() -> str:
    """Return versions and the device in one line."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {device}, {platform.node()}"


def describe_config(cfg: CfgNode) -> str:
    """Return the keys that differ from the defaults, one per line."""
    lines = [f"  {key} = {value!r}" for key, (_, value) in cfg.diff(get_cfg()).items() if value is not MISSING]
    return "\n".join(lines) or "  nowhere"


def describe_data(trainer: Any) -> str:
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
