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

from torch import nn

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
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.evaluation import check_metrics, format_results, predict_dataset, verify_results
from hookline.engine.modeling import resolve_device
from hookline.engine.setup.report import describe_run


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


def trained_model(cfg: CfgNode, resume: bool) -> nn.Module:
    """Build the model with MODEL.WEIGHTS, or with ``resume`` the weights of the last checkpoint."""
    model = DefaultTrainer.build_model(cfg)
    checkpointer = Checkpointer(model, cfg.OUTPUT_DIR)
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
    return model


def predict(cfg: CfgNode, model: nn.Module) -> None:
    """Write predictions for each of DATASETS.TEST."""
    adapter, device = DefaultTrainer.build_adapter(cfg), resolve_device(cfg.MODEL.DEVICE)
    for entry in cfg.DATASETS.TEST:
        name = name_of(entry)
        path, count = predict_dataset(
            model,
            DefaultTrainer.build_test_loader(cfg, name),
            os.path.join(cfg.OUTPUT_DIR, "inference", name),
            format=cfg.TEST.PREDICTIONS_FORMAT,
            predict=adapter.predict,
            device=device,
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
        model = trained_model(cfg, args.resume)
        begin_run(cfg)
        if args.predict:
            predict(cfg, model)
            return
        results = DefaultTrainer.test(cfg, model)
        if comm.is_main_process():
            print(f"Results:\n{format_results(results)}")
        raise SystemExit(0 if verify_results(cfg, results) else 1)
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
