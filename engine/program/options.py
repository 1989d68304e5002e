"""From the options of a command line to the config of a run."""

import argparse

from ...config import CfgNode, ConfigError, get_cfg, locate
from ...config.components import errors_at
from ..defaults import DefaultTrainer
from ..evaluation.build import EVALUATOR_KEY
from ..setup.check import overridden_builders


def merge_options(args: argparse.Namespace, cfg: CfgNode | None = None) -> CfgNode:
    """Return a config with ``args.config_file`` and the KEY VALUE pairs ``args.opts`` merged into it.

    Args:
        args: the parsed command line.
        cfg: the config to start from, which is not changed. Default: ``get_cfg()``. A frozen config is complete:
            nothing is merged.
    """
    if cfg is not None and cfg.is_frozen():
        return cfg
    cfg = get_cfg() if cfg is None else cfg.clone()
    if args.config_file:
        cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    return cfg


def named_trainer(name: str) -> type[DefaultTrainer]:
    """Return the class that ``--trainer`` names, as ``"my_trainer:Trainer"``; DefaultTrainer if the name is empty.

    Raises:
        ConfigError: it cannot be imported, or is no subclass of DefaultTrainer.
    """
    with errors_at("--trainer"):
        trainer = locate(name) if name else DefaultTrainer
        if not (isinstance(trainer, type) and issubclass(trainer, DefaultTrainer)):
            raise ConfigError(f"{name} is no subclass of DefaultTrainer")
        return trainer


def check_options(args: argparse.Namespace, cfg: CfgNode, trainer: type[DefaultTrainer] = DefaultTrainer) -> None:
    """Check that the config has what the options need. ``check_config()`` checks the rest.

    Args:
        args: the parsed command line.
        cfg: the full config.
        trainer: what a ``build_*`` method of this class replaces is not needed.

    Raises:
        ConfigError: a key is missing, or options contradict each other.
    """
    overridden = overridden_builders(trainer, DefaultTrainer)
    look = next((name for name in ("eval_only", "predict") if getattr(args, name, False)), "")
    evaluates = bool(cfg.DATASETS.TEST) and overridden.isdisjoint({"build_evaluator", "test"})
    needed = [
        ("MODEL.NAME", cfg.MODEL.NAME, "build_model" not in overridden),
        ("DATASETS.TRAIN", cfg.DATASETS.TRAIN, "build_train_loader" not in overridden and not look),
        ("TEST.EVALUATOR.NAME", EVALUATOR_KEY.name(cfg), evaluates),
    ]
    for key, value, is_needed in needed:
        if is_needed and not value:
            raise ConfigError(f"{key}: is not set; give a --config-file that sets it, such as configs/digits/mlp.yaml")
    if look:
        if args.eval_only and args.predict:
            raise ConfigError("--eval-only and --predict: choose one")
        task = "evaluate" if args.eval_only else "predict with"
        if not cfg.DATASETS.TEST:
            raise ConfigError(f"DATASETS.TEST: is empty, so there is nothing to {task.split()[0]}")
        if not cfg.MODEL.WEIGHTS and not args.resume:
            raise ConfigError(
                f"MODEL.WEIGHTS: is not set; give the weights to {task}: a file, or --resume for the last"
            )
