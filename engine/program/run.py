"""``run(Trainer, args)``: the last line of a training script."""

import argparse
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ...command_line import config_errors_exit, default_argument_parser
from ...config import CfgNode, ConfigError, Duration, name_of
from ...config.yaml_files import pairs_of
from ...hooks.common import optimizers_of
from .. import comm
from ..data.build import NoTrainData, check_same_length
from ..defaults import DefaultTrainer
from ..evaluation import format_results, verify_results, write_predictions
from ..evaluation.predictions import prediction_rows
from ..evaluation.testing import sanity_check
from ..launch import launch
from ..parallel.base import build_strategy
from ..run import begin_run, default_setup
from ..setup.check import check_config, overridden_builders
from ..setup.report import describe_run
from .options import check_options, merge_options


def run(trainer: type[DefaultTrainer], args: argparse.Namespace, cfg: CfgNode | None = None) -> Any:
    """Train, evaluate or predict as the command line says, in one process or several.

    All options of :func:`default_argument_parser` are handled: ``--eval-only``, ``--predict``, ``--replay``,
    ``--samples``, ``--dry-run``, ``--resume``, ``--num-gpus``. A bad config ends the process with
    one line and exit code 2; a stopped run with its own code (docs/errors.md).

    Args:
        trainer: :class:`DefaultTrainer`, or a subclass with ``build_*`` methods of its own.
        args: the parsed command line. The parser may have more options.
        cfg: the config that the file and the KEY VALUE pairs are merged into, with the project's own keys. It is not
            changed. Default: ``get_cfg()``. A frozen config is complete: nothing is merged.

    Returns:
        The :class:`TrainResult`; with ``--eval-only`` the results, with ``--predict`` the names of the files, with
        ``--dry-run`` the text. None with ``--replay`` and ``--samples``, and if several processes cannot pickle it.

    A script does not pass the result to ``sys.exit()``, which takes any object but 0 and None for a failure.

    Example::

        if __name__ == "__main__":
            args = default_argument_parser().parse_args()
            run(Trainer, args)
    """
    with config_errors_exit():
        if not (isinstance(trainer, type) and issubclass(trainer, DefaultTrainer)):
            raise ConfigError(f"run(trainer, args): trainer is DefaultTrainer or a subclass of it, not {trainer!r}")
        args, given = _with_all_options(args), cfg
        cfg = merge_options(args, cfg)
        if args.replay is not None or args.samples is not None:
            return _look_again(trainer, args, cfg.OUTPUT_DIR, given)
        check_options(args, cfg, trainer)
        cfg.freeze()
        check_config(cfg, overridden_builders(_kind(trainer, args), DefaultTrainer))  # before processes start
        if args.dry_run and args.num_machines > 1:
            raise ConfigError("--dry-run builds the run on this machine only: leave --num-machines out")
        return launch(
            _run_rank,
            args.num_gpus,
            num_machines=args.num_machines,
            machine_rank=args.machine_rank,
            dist_url=args.dist_url,
            args=(trainer, args, cfg),
            timeout=timedelta(seconds=Duration.parse_time(cfg.PARALLEL.TIMEOUT).seconds),
            device=cfg.MODEL.DEVICE,
        )


def _kind(trainer: type[DefaultTrainer], args: argparse.Namespace) -> type[DefaultTrainer]:
    """Return the class of the run: with ``--eval-only`` and ``--predict`` a subclass without training data."""
    if not (args.eval_only or args.predict):
        return trainer

    class InferenceTrainer(trainer):  # type: ignore[misc, valid-type]
        @classmethod
        def build_train_loader(cls, cfg: CfgNode) -> NoTrainData:
            return NoTrainData()

        @classmethod
        def build_lr_scheduler(cls, cfg: CfgNode, optimizer: Any) -> list[torch.optim.lr_scheduler.LRScheduler]:
            return [torch.optim.lr_scheduler.LambdaLR(one, lambda _: 1.0) for one in optimizers_of(optimizer)]

    return InferenceTrainer


def _with_all_options(args: argparse.Namespace) -> argparse.Namespace:
    """Return a parsed command line with all of hookline's options. Those that are the script's have their defaults."""
    full = default_argument_parser().parse_args([])
    ours = getattr(args, "ours", full.ours)
    for name, value in vars(args).items():
        if name in ours or name not in full:
            setattr(full, name, value)
    full.handled = True
    return full


def _look_again(trainer: type[DefaultTrainer], args: argparse.Namespace, folder: str, cfg: CfgNode | None) -> None:
    """Handle ``--replay`` and ``--samples``. KEY VALUE pairs are for the replay."""
    from .repeat import replay_in_ranks  # it imports this room
    from .samples import samples_at

    if args.samples is not None:
        print(*samples_at(folder, args.samples, cfg, trainer.build_train_loader), sep="\n")
        return
    pairs = [part for pair in pairs_of(args.opts) for part in pair]
    replay_in_ranks(folder, args.replay, trainer, cfg=cfg, overrides=pairs)


def _run_rank(kind: type[DefaultTrainer], args: argparse.Namespace, cfg: CfgNode) -> Any:
    """One process of the run. If it fails and has written nothing, no new folder is left."""
    path = Path(cfg.OUTPUT_DIR).absolute()
    new = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        return _work(kind, args, cfg)
    except BaseException:
        if comm.is_main_process():
            with suppress(OSError):  # it has files
                for folder in new:
                    folder.rmdir()
        raise


def _work(kind: type[DefaultTrainer], args: argparse.Namespace, cfg: CfgNode) -> Any:
    default_setup(cfg, args)
    if args.dry_run:
        return _dry_run(kind, args, cfg)
    if args.eval_only or args.predict:
        from .predictor import load_weights

        trainer = _kind(kind, args)(cfg)
        content = load_weights(cfg, trainer.model, args.resume, type(trainer.checkpointer))
        if trainer.loss_module is not None:
            trainer.loss_module.load_from(content)
        begin_run(cfg)
        return _predict(trainer) if args.predict else _evaluate(trainer)
    build_strategy(cfg).sizes(comm.get_world_size())
    trainer = kind(cfg)
    trainer.resume_or_load(resume=args.resume)
    result = trainer.train()
    if result.exit_code:  # the run was stopped: see docs/errors.md
        raise SystemExit(result.exit_code)
    return result


def _dry_run(kind: type[DefaultTrainer], args: argparse.Namespace, cfg: CfgNode) -> str:
    trainer = kind(cfg)
    trainer.resume_or_load(resume=args.resume)  # raises the errors that a run would raise
    sanity_check(trainer, overridden_builders(kind, DefaultTrainer))
    description = describe_run(trainer)
    if comm.is_main_process():
        print(description)
    return description


def _evaluate(trainer: DefaultTrainer) -> Mapping[str, Any]:
    """Evaluate on DATASETS.TEST, print the results, and compare them with TEST.EXPECTED_RESULTS."""
    if trainer.cfg.TEST.EXPECTED_RESULTS:  # a misspelt name is found here, not after a long evaluation
        sanity_check(trainer, overridden_builders(type(trainer), DefaultTrainer))
    results = trainer.evaluate()
    if comm.is_main_process():
        print(f"Results:\n{format_results(results)}")
    verify_results(trainer.cfg, results)
    return results


def _predict(trainer: DefaultTrainer) -> list[str]:
    """Write predictions for each of DATASETS.TEST, and print the names of the files. Returns the names."""
    cfg, paths = trainer.cfg, []
    for entry in cfg.DATASETS.TEST:
        name = name_of(entry)
        loader = check_same_length(trainer.build_test_loader(cfg, name), f"DATASETS.TEST ({name})")
        outputs = trainer.predict(loader, with_batches=True)
        path = os.path.join(cfg.OUTPUT_DIR, "inference", name, f"predictions.{cfg.TEST.PREDICTIONS_FORMAT}")
        count = write_predictions(prediction_rows(outputs, cfg.TEST.PREDICTIONS_COLUMNS, trainer.adapter, loader), path)
        if comm.is_main_process():
            print(f"{path}: {count} samples")
        paths.append(path)
    return paths
