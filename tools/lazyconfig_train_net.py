#!/usr/bin/env python
"""Train or evaluate what a LazyConfig describes, detectron2's configs in Python. Needs the extra "lazy".

    python tools/lazyconfig_train_net.py --config-file configs/synthetic/mlp_lazy.py
    python tools/lazyconfig_train_net.py --config-file configs/synthetic/mlp_lazy.py train.max_iter=50 optimizer.lr=0.01

A config has these objects; calls are written with LazyCall:

    model               a module; in training it returns its losses
    adapter             optional: a ModelAdapter, for models that return predictions in training
    optimizer           an optimizer; its params are a call that takes the model
    lr_multiplier       a scheduler of fvcore, which multiplies the learning rate
    dataloader.train    a loader of batches
    dataloader.test     optional, with dataloader.evaluator: a loader, and a DatasetEvaluator
    train               output_dir, max_iter, device, seed, init_checkpoint, amp.enabled, ddp (arguments of
                        DistributedDataParallel), checkpointer (arguments of PeriodicCheckpointer), eval_period,
                        log_period
"""

import argparse
import logging
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from hookline.config import ConfigError, LazyConfig, UnknownKeyError, instantiate
from hookline.engine import (
    AMPTrainer,
    SimpleTrainer,
    begin_run,
    comm,
    config_errors_exit,
    create_ddp_model,
    default_argument_parser,
    default_setup,
    default_writers,
    hooks,
    launch,
)
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.evaluation import format_results, inference_on_dataset
from hookline.engine.modeling import ModelAdapter

logger = logging.getLogger("hookline.lazy")

NEEDED = ("model", "optimizer", "lr_multiplier", "dataloader.train", "train.output_dir", "train.max_iter")


def load(args: argparse.Namespace) -> Any:
    """Load the config file, and apply the command line."""
    cfg = LazyConfig.apply_overrides(LazyConfig.load(args.config_file), args.opts)
    for key in (*NEEDED, *(("dataloader.evaluator", "train.init_checkpoint") if args.eval_only else ())):
        if not find(cfg, key):
            raise UnknownKeyError(f"{args.config_file}: there is no {key}")
    return cfg


def find(cfg: Any, key: str, default: Any = None) -> Any:
    """Return the value of a dotted key, or a default."""
    return OmegaConf.select(cfg, key, default=default)


def build_model(cfg: Any) -> nn.Module:
    """Build the model, and wrap it if several ranks train it."""
    model = instantiate(cfg.model).to(find(cfg, "train.device", "cpu"))
    return create_ddp_model(model, **find(cfg, "train.ddp", {}))


def evaluate(cfg: Any, model: nn.Module, adapter: ModelAdapter) -> dict[str, Any]:
    """Compute the metrics of the test set, if there is one."""
    if find(cfg, "dataloader.evaluator") is None:
        return {}
    loader, evaluator = instantiate(cfg.dataloader.test), instantiate(cfg.dataloader.evaluator)
    return inference_on_dataset(model, loader, evaluator, predict=adapter.predict)


def train(cfg: Any, resume: bool) -> int:
    """Train the model. Returns the exit code, not 0 if the run was stopped before its end."""
    model = build_model(cfg)
    adapter = instantiate(find(cfg, "adapter")) or ModelAdapter()
    cfg.optimizer.params.model = model
    optimizer = instantiate(cfg.optimizer)
    loader = instantiate(cfg.dataloader.train)
    kind = AMPTrainer if find(cfg, "train.amp.enabled") else SimpleTrainer
    trainer = kind(model, loader, optimizer, adapter=adapter, device=find(cfg, "train.device", "cpu"))
    checkpointer = Checkpointer(model, cfg.train.output_dir, trainer=trainer)
    max_iter, period = cfg.train.max_iter, find(cfg, "train.log_period", 20)
    writers = default_writers(cfg.train.output_dir, max_iter) if comm.is_main_process() else []
    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.SignalHandler(),
            hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
            hooks.EvalHook(find(cfg, "train.eval_period", 0), lambda: evaluate(cfg, model, adapter)),
            hooks.PeriodicWriter(writers, period=period),
            hooks.PeriodicCheckpointer(checkpointer, **find(cfg, "train.checkpointer", {"period": 5000})),
        ]
    )
    checkpoint = checkpointer.resume_or_load(find(cfg, "train.init_checkpoint", ""), resume=resume)
    begin_run(cfg)
    start_iter = checkpoint.get("iteration", -1) + 1 if resume else 0
    return trainer.train(start_iter, max_iter).exit_code


def main(args: argparse.Namespace) -> None:
    """One process of the run."""
    cfg = load(args)
    default_setup(cfg, args)
    if args.eval_only:
        model = build_model(cfg)
        Checkpointer(model, cfg.train.output_dir).resume_or_load(cfg.train.init_checkpoint, resume=args.resume)
        begin_run(cfg)
        adapter = instantiate(find(cfg, "adapter")) or ModelAdapter()
        logger.info("Results:\n%s", format_results(evaluate(cfg, model, adapter)))
        return
    exit_code = train(cfg, args.resume)
    if exit_code:  # the run was stopped: see docs/errors.md
        raise SystemExit(exit_code)


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    with config_errors_exit():
        for option in ("predict", "dry_run"):
            if getattr(args, option):
                raise ConfigError(f"--{option.replace('_', '-')}: is for YAML configs and tools/train_net.py")
        load(args)  # errors come before processes start
        launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))
