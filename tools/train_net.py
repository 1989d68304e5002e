#!/usr/bin/env python
"""Train or evaluate the model that a config file describes, or predict with it.

    python tools/train_net.py --config-file configs/digits/convnet.yaml
    python tools/train_net.py --config-file configs/digits/convnet.yaml --num-gpus 2
    torchrun --nproc-per-node 2 tools/train_net.py --config-file configs/digits/convnet.yaml

For a model, data or hooks of your own, name them in the config ("my_package.nets:Net"), or copy this script and
subclass DefaultTrainer in it.
"""

import os
import signal

if __name__ == "__main__":  # the imports take seconds, in which signals have the same meaning: docs/checkpoints.md
    for name, code in (("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75)):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_, code=code: os._exit(code))

import argparse
from datetime import timedelta
from typing import Any

import torch

from hookline.config import CfgNode, ConfigError, Duration, get_cfg, name_of
from hookline.engine import (
    DefaultTrainer,
    begin_run,
    check_config,
    comm,
    config_errors_exit,
    default_argument_parser,
    default_setup,
    launch,
)
from hookline.engine.data.given import NoTrainData
from hookline.engine.evaluation import check_metrics, format_results, prediction_rows, verify_results, write_predictions
from hookline.engine.setup.report import describe_run
from hookline.hooks.common.optimizers import optimizers_of


def setup(args: argparse.Namespace) -> CfgNode:
    """Build the config: defaults, then the file, then the command line. default_setup() checks the rest."""
    cfg = get_cfg()
    if args.config_file:
        cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    needed = {"MODEL.NAME": cfg.MODEL.NAME, "DATASETS.TRAIN": cfg.DATASETS.TRAIN}
    if cfg.DATASETS.TEST:
        needed["TEST.EVALUATOR.NAME"] = cfg.TEST.EVALUATOR.NAME
    for key, value in needed.items():
        if not value:
            raise ConfigError(f"{key}: is not set; give a --config-file that sets it, such as configs/digits/mlp.yaml")
    if args.eval_only and args.predict:
        raise ConfigError("--eval-only and --predict: choose one")
    if args.eval_only or args.predict:
        option, task = ("--eval-only", "evaluate") if args.eval_only else ("--predict", "predict with")
        if not cfg.DATASETS.TEST:
            raise ConfigError(f"DATASETS.TEST: is empty, so there is nothing for {option}")
        if not cfg.MODEL.WEIGHTS and not args.resume:
            raise ConfigError(f"MODEL.WEIGHTS: {option} needs the weights to {task}: a file, or --resume for the last")
        if args.resume and not has_checkpoints(cfg.OUTPUT_DIR):
            raise ConfigError(f"OUTPUT_DIR: there is no checkpoint in {cfg.OUTPUT_DIR} to {task}")
    if cfg.DATASETS.TEST and not args.predict:
        check_metrics(cfg)
    cfg.freeze()
    return cfg


def has_checkpoints(folder: str) -> bool:
    """Whether a run's folder has files that may be checkpoints."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return any(name == "last_checkpoint" or name.endswith(".pth") for name in names)


class Look(DefaultTrainer):
    """Evaluates and predicts, with the hooks of a run. It has no training data."""

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> NoTrainData:
        return NoTrainData()

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: Any) -> list[Any]:
        return [torch.optim.lr_scheduler.LambdaLR(one, lambda _: 1.0) for one in optimizers_of(optimizer)]


def load_weights(trainer: Look, resume: bool) -> None:
    """Load MODEL.WEIGHTS, or with ``resume`` the weights of the last checkpoint."""
    cfg = trainer.cfg
    checkpointer = type(trainer.checkpointer)(trainer.model, cfg.OUTPUT_DIR)  # without the trainer's state
    checkpointer.resume_or_load(
        "" if resume else cfg.MODEL.WEIGHTS,
        resume=resume,
        strict=cfg.MODEL.WEIGHTS_STRICT,
        weights_from=cfg.MODEL.WEIGHTS_FROM,
    )
    if resume and not checkpointer.resumed_from:
        raise ConfigError(f"OUTPUT_DIR: there is no complete checkpoint in {cfg.OUTPUT_DIR}, except copies of the best")
    if checkpointer.missing_keys:
        raise ConfigError(
            f"MODEL.WEIGHTS: {checkpointer.loaded_from} is of another model than {cfg.MODEL.NAME}: "
            f"it has no {', '.join(checkpointer.missing_keys[:3])}"
        )


def predict(trainer: Look) -> None:
    """Write predictions for each of DATASETS.TEST."""
    cfg = trainer.cfg
    for entry in cfg.DATASETS.TEST:
        name = name_of(entry)
        outputs = trainer.predict(trainer.build_test_loader(cfg, name), with_batches=True)
        path, count = write_predictions(
            prediction_rows(outputs, cfg.TEST.PREDICTIONS_COLUMNS, trainer.adapter),
            os.path.join(cfg.OUTPUT_DIR, "inference", name),
            format=cfg.TEST.PREDICTIONS_FORMAT,
        )
        if comm.is_main_process():
            print(f"{path}: {count} samples")


def main(args: argparse.Namespace, cfg: CfgNode) -> None:
    """One process of the run."""
    default_setup(cfg, args)
    if args.dry_run:
        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=args.resume)  # raises the errors that a run would raise
        description = describe_run(trainer)
        if comm.is_main_process():
            print(description)
        return
    if args.eval_only or args.predict:
        trainer = Look(cfg)
        load_weights(trainer, args.resume)
        begin_run(cfg)
        if args.predict:
            predict(trainer)
            return
        results = trainer.evaluate()
        if comm.is_main_process():
            print(f"Results:\n{format_results(results)}")
        verify_results(cfg, results)
        return
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    exit_code = trainer.train().exit_code
    if exit_code:  # the run was stopped: see docs/checkpoints.md
        raise SystemExit(exit_code)


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    with config_errors_exit():
        cfg = setup(args)
        if args.num_gpus * args.num_machines > 1:
            check_config(cfg)  # once, before processes start
        launch(
            main,
            args.num_gpus,
            num_machines=args.num_machines,
            machine_rank=args.machine_rank,
            dist_url=args.dist_url,
            args=(args, cfg),
            timeout=timedelta(seconds=Duration.parse_time(cfg.PARALLEL.TIMEOUT).seconds),
            device=cfg.MODEL.DEVICE,
        )
