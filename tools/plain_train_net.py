#!/usr/bin/env python
"""Train like train_net.py, with a hand-written loop to read and change.

It uses hookline's parts (config, data, model, optimizer, schedule, checkpoints, metrics) without its trainers and
hooks. Start here if your training does not fit a trainer.

    python tools/plain_train_net.py --config-file configs/digits/convnet.yaml
"""

import argparse
import logging

import torch

from hookline.config import CfgNode, ConfigError, Duration, get_cfg, name_of
from hookline.engine import (
    begin_run,
    config_errors_exit,
    default_argument_parser,
    default_setup,
    default_writers,
    launch,
)
from hookline.engine.checkpoint import Checkpointer, PeriodicCheckpointer
from hookline.engine.data import EpochIterator, build_test_loader, build_train_loader, move_to_device
from hookline.engine.evaluation import build_evaluator, format_results, inference_on_dataset
from hookline.engine.launch import launched_by_torchrun
from hookline.engine.modeling import ModelAdapter, build_adapter, build_model, resolve_device
from hookline.engine.resume.lengths import NO_END, resolve_lengths
from hookline.engine.solver import build_lr_scheduler, build_optimizer
from hookline.hooks import EventStorage, StopSignals

logger = logging.getLogger("hookline.plain")


def evaluate(cfg: CfgNode, model: torch.nn.Module, adapter: ModelAdapter) -> dict:
    """Compute the metrics of each test set."""
    results: dict = {}
    for name in (name_of(entry) for entry in cfg.DATASETS.TEST):
        loader, evaluator = build_test_loader(cfg, name), build_evaluator(cfg, name, targets_of=adapter.targets)
        results |= inference_on_dataset(model, loader, evaluator, predict=adapter.predict)
    return results


def train(cfg: CfgNode, model: torch.nn.Module, adapter: ModelAdapter, resume: bool) -> int:
    """Train ``model``. Returns the exit code, not 0 if the run was stopped before its end."""
    model.train()
    device = resolve_device(cfg.MODEL.DEVICE)
    optimizer = build_optimizer(cfg, model)
    loader = build_train_loader(cfg)
    cfg = resolve_lengths(cfg, len(loader))
    scheduler = build_lr_scheduler(cfg, optimizer)
    batches = EpochIterator(loader)

    max_iter = cfg.SOLVER.MAX_ITER
    if max_iter == NO_END:
        raise ConfigError("SOLVER.MAX_ITER: this loop takes iterations or epochs; use train_net.py for a time")
    checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, optimizer=optimizer, scheduler=scheduler, data=batches)
    start_iter = checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume).get("iteration", -1) + 1
    period = Duration.parse(cfg.SOLVER.CHECKPOINT_PERIOD).iterations(len(loader)) or max_iter
    periodic_checkpointer = PeriodicCheckpointer(checkpointer, period, max_iter=max_iter)

    begin_run(cfg)  # files are written from here on
    writers = default_writers(cfg.OUTPUT_DIR, max_iter)
    for writer in writers:
        writer.resume(start_iter)
    logger.info("Starting training from iteration %d", start_iter)
    with EventStorage(start_iter) as storage, StopSignals() as stop:
        for iteration in range(start_iter, max_iter):
            storage.iter = iteration
            losses = adapter.losses(model, move_to_device(next(batches), device))
            losses.pop("num_items", None)  # some models return it, to weight micro-batches
            total = sum(losses.values())
            optimizer.zero_grad()
            total.backward()
            optimizer.step()

            storage.put_scalars(total_loss=total, **losses)
            storage.put_scalar("lr", optimizer.param_groups[0]["lr"], smoothing_hint=False)
            scheduler.step()
            if (iteration + 1) % 20 == 0 or iteration + 1 == max_iter:
                for writer in writers:
                    writer.write()
            periodic_checkpointer.step(iteration)
            if stop.reason and iteration + 1 < max_iter:
                logger.info("Training ended at iteration %d: %s", iteration + 1, stop.reason)
                checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
                for writer in writers:
                    writer.close()
                return stop.exit_code

        storage.iter = max_iter
        results = evaluate(cfg, model, adapter)
        for name, metrics in results.items():
            with storage.name_scope(name):
                storage.put_scalars(**metrics, smoothing_hint=False)
        for writer in writers:
            writer.write()
            writer.close()
    logger.info("Results:\n%s", format_results(results))
    return 0


def main(args: argparse.Namespace) -> None:
    """One process of the run."""
    cfg = get_cfg()
    if args.config_file:
        cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    default_setup(cfg, args)
    model, adapter = build_model(cfg), build_adapter(cfg)
    if args.eval_only:
        Checkpointer(model, cfg.OUTPUT_DIR).resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
        begin_run(cfg)
        logger.info("Results:\n%s", format_results(evaluate(cfg, model, adapter)))
        return
    exit_code = train(cfg, model, adapter, args.resume)
    if exit_code:
        raise SystemExit(exit_code)


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    with config_errors_exit():
        if args.num_gpus * args.num_machines > 1 or launched_by_torchrun():
            raise ConfigError(f"--num-gpus {args.num_gpus}: this loop trains in one process; train_net.py in several")
        if args.fast_dev_run:
            raise ConfigError("--fast-dev-run: this loop has no such trial; train_net.py has")
        launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))
