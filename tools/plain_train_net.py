#!/usr/bin/env python
"""Train like train_net.py, with a hand-written loop to read and change.

It uses hookline's parts (config, data, model, optimizer, schedule, checkpoints, metrics) without its trainers and
hooks. Start here if your training does not fit a trainer.

    python tools/plain_train_net.py --config-file configs/digits/convnet.yaml
"""

import argparse
import logging
import math

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
from hookline.engine.evaluation import (
    build_evaluator,
    flatten_results_dict,
    format_results,
    inference_on_dataset,
    verify_results,
)
from hookline.engine.evaluation.testing import predictor
from hookline.engine.launch import launched_by_torchrun
from hookline.engine.modeling import ModelAdapter, build_adapter, build_model, resolve_device
from hookline.engine.resume.lengths import resolve_lengths
from hookline.engine.solver import build_lr_scheduler, build_optimizer
from hookline.hooks import EventStorage, StopSignals, get_event_storage

logger = logging.getLogger("hookline.plain")

# The keys that this loop follows. Another key that is set is an error: add to the loop what it means, and the key here.
FOLLOWED = (
    *("VERSION", "OUTPUT_DIR", "SEED", "CUDNN_BENCHMARK", "DETERMINISTIC", "FLOAT32_PRECISION"),
    *("MODEL", "DATASETS", "DATALOADER"),
    *("SOLVER.MAX_ITER", "SOLVER.OPTIMIZER", "SOLVER.BASE_LR", "SOLVER.MOMENTUM", "SOLVER.NESTEROV"),
    *("SOLVER.WEIGHT_DECAY", "SOLVER.WEIGHT_DECAY_NORM", "SOLVER.WEIGHT_DECAY_BIAS", "SOLVER.BIAS_LR_FACTOR"),
    *("SOLVER.PARAM_GROUPS", "SOLVER.LAYER_DECAY", "SOLVER.CLIP_GRADIENTS", "SOLVER.CHECKPOINT_PERIOD"),
    *("SOLVER.LR_SCHEDULER_NAME", "SOLVER.LR_SCHEDULER_ARGS", "SOLVER.GAMMA", "SOLVER.STEPS", "SOLVER.NUM_DECAYS"),
    *("SOLVER.BASE_LR_END", "SOLVER.WARMUP_FACTOR", "SOLVER.WARMUP_ITERS", "SOLVER.WARMUP_METHOD"),
    *("SOLVER.RESCALE_INTERVAL", "TEST.EVAL_PERIOD", "TEST.EVALUATOR", "TEST.METRICS", "TEST.EXPECTED_RESULTS"),
    *("CHECKPOINT.ASYNC", "CHECKPOINT.MAX_TO_KEEP", "CHECKPOINT.BEST.METRIC", "CHECKPOINT.BEST.MODE"),
    *("LOG.PERIOD", "LOG.LEVEL"),
)


def check_followed(cfg: CfgNode) -> None:
    """Raise an error for keys that are set, and that this loop does not follow."""
    names = [key for key in cfg.diff(get_cfg()) if not any(f"{key}.".startswith(f"{name}.") for name in FOLLOWED)]
    if names:
        raise ConfigError(f"{', '.join(names)}: this loop does not follow the key; leave it out, or use train_net.py")


def evaluate(cfg: CfgNode, model: torch.nn.Module, adapter: ModelAdapter) -> dict:
    """Compute the metrics of each test set."""
    results: dict = {}
    for name in (name_of(entry) for entry in cfg.DATASETS.TEST):
        loader, evaluator = build_test_loader(cfg, name), build_evaluator(cfg, name, targets_of=adapter.targets)
        results |= inference_on_dataset(model, loader, evaluator, predict=predictor(adapter, evaluator))
    return results


def train(cfg: CfgNode, model: torch.nn.Module, adapter: ModelAdapter, resume: bool) -> int:
    """Train ``model``. Returns the exit code, not 0 if the run was stopped before its end."""
    model.train()
    device = resolve_device(cfg.MODEL.DEVICE)
    optimizer = build_optimizer(cfg, model)
    loader = build_train_loader(cfg)
    epoch = cfg.DATALOADER.ITERS_PER_EPOCH or len(loader)
    cfg = resolve_lengths(cfg, epoch)
    scheduler = build_lr_scheduler(cfg, optimizer)
    batches = EpochIterator(loader, epoch)

    max_iter = cfg.SOLVER.MAX_ITER
    checkpointer = Checkpointer(
        model,
        cfg.OUTPUT_DIR,
        asynchronous=cfg.CHECKPOINT.ASYNC,
        optimizer=optimizer,
        scheduler=scheduler,
        data=batches,
    )
    loaded = load(cfg, checkpointer, resume)
    start_iter, best = loaded.get("iteration", -1) + 1, loaded.get("best")
    periods = (cfg.SOLVER.CHECKPOINT_PERIOD, cfg.TEST.EVAL_PERIOD, cfg.LOG.PERIOD)
    save_period, eval_period, log_period = (Duration.parse(period).iterations(epoch) or max_iter for period in periods)
    keep = cfg.CHECKPOINT.MAX_TO_KEEP or None
    periodic_checkpointer = PeriodicCheckpointer(checkpointer, save_period, max_iter=max_iter, max_to_keep=keep)

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
            if not math.isfinite(total.item()):
                raise FloatingPointError(f"the loss is {total.item():g} at iteration {iteration}")
            optimizer.zero_grad()
            total.backward()
            optimizer.step()

            storage.put_scalars(total_loss=total, **losses)
            storage.put_scalar("lr", optimizer.param_groups[0]["lr"], smoothing_hint=False)
            scheduler.step()
            if (iteration + 1) % eval_period == 0 and iteration + 1 < max_iter:
                best = evaluate_and_log(cfg, model, adapter, checkpointer, best)[1]
            if (iteration + 1) % log_period == 0 or iteration + 1 == max_iter:
                for writer in writers:
                    writer.write()
            periodic_checkpointer.step(iteration, best=best)
            if stop.reason and iteration + 1 < max_iter:
                logger.info("Training ended at iteration %d: %s", iteration + 1, stop.reason)
                checkpointer.save(f"model_{iteration:07d}", iteration=iteration, best=best)
                checkpointer.close()
                for writer in writers:
                    writer.close()
                return stop.exit_code

        storage.iter = max_iter
        results, _ = evaluate_and_log(cfg, model, adapter, checkpointer, best)
        for writer in writers:
            writer.write()
            writer.close()
    checkpointer.close()
    logger.info("Results:\n%s", format_results(results))
    verify_results(cfg, results)
    return 0


def load(cfg: CfgNode, checkpointer: Checkpointer, resume: bool) -> dict:
    """Load the last checkpoint if ``resume`` is True and there is one; otherwise MODEL.WEIGHTS."""
    model = cfg.MODEL
    return checkpointer.resume_or_load(
        model.WEIGHTS, resume=resume, strict=model.WEIGHTS_STRICT, weights_from=model.WEIGHTS_FROM
    )


def evaluate_and_log(
    cfg: CfgNode, model: torch.nn.Module, adapter: ModelAdapter, checkpointer: Checkpointer, best: float | None
) -> tuple[dict, float | None]:
    """Evaluate, put the results into the storage, and save ``model_best`` if CHECKPOINT.BEST.METRIC has improved.

    Returns:
        The results, and the best value so far.
    """
    results = evaluate(cfg, model, adapter)
    metrics = flatten_results_dict(results)
    get_event_storage().put_scalars(**metrics, smoothing_hint=False)
    metric, sign = cfg.CHECKPOINT.BEST.METRIC, 1 if cfg.CHECKPOINT.BEST.MODE == "max" else -1
    if metric and metric not in metrics:
        raise ConfigError(f"CHECKPOINT.BEST.METRIC: {metric!r} is not among {', '.join(metrics) or 'no results'}")
    if metric and (best is None or sign * metrics[metric] > sign * best):
        best = metrics[metric]
        checkpointer.save("model_best", tag_last=False, **{metric: best})
    return results, best


def main(args: argparse.Namespace) -> None:
    """One process of the run."""
    cfg = get_cfg()
    if args.config_file:
        cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    if args.eval_only and not (cfg.DATASETS.TEST and (cfg.MODEL.WEIGHTS or args.resume)):
        raise ConfigError("--eval-only: set DATASETS.TEST, and MODEL.WEIGHTS or --resume")
    check_followed(cfg)
    default_setup(cfg, args)
    model, adapter = build_model(cfg), build_adapter(cfg)
    if args.eval_only:
        load(cfg, Checkpointer(model, cfg.OUTPUT_DIR), args.resume)
        begin_run(cfg)
        results = evaluate(cfg, model, adapter)
        logger.info("Results:\n%s", format_results(results))
        verify_results(cfg, results)
        return
    exit_code = train(cfg, model, adapter, args.resume)
    if exit_code:
        raise SystemExit(exit_code)


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    with config_errors_exit():
        if args.num_gpus * args.num_machines > 1 or launched_by_torchrun():
            raise ConfigError(f"--num-gpus {args.num_gpus}: this loop trains in one process; train_net.py in several")
        for option in ("predict", "dry_run", "fast_dev_run"):
            if getattr(args, option):
                raise ConfigError(f"--{option.replace('_', '-')}: this loop has no such option; train_net.py has")
        launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))
