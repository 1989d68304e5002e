#!/usr/bin/env python
"""Train like train_net.py, with a hand-written loop to read and change.

It uses hookline's parts (config, data, model, optimizer, schedule, checkpoints, metrics) without its trainers and
hooks. Start here if your training does not fit a trainer. tools/train_net.py evaluates its checkpoints.

    python tools/plain_train_net.py --config-file configs/digits/convnet.yaml
"""

import logging
import math
from typing import Any

import torch

from hookline.config import CfgNode, ConfigError, Duration, get_cfg, name_of
from hookline.config.values import mode_of
from hookline.engine import begin_run, config_errors_exit, default_argument_parser, default_setup, default_writers
from hookline.engine.checkpoint import Checkpointer, PeriodicCheckpointer
from hookline.engine.data import EpochIterator, build_test_loader, build_train_loader, move_to_device
from hookline.engine.evaluation import build_evaluator, flatten_results_dict, format_results, inference_on_dataset
from hookline.engine.evaluation.testing import predictor
from hookline.engine.launch import launched_by_torchrun
from hookline.engine.modeling import ModelAdapter, build_adapter, build_model, resolve_device
from hookline.engine.setup.check import check_config
from hookline.engine.solver import build_lr_scheduler, build_optimizer
from hookline.engine.solver.schedules import resolve_lengths
from hookline.hooks import EventStorage, StopSignals

logger = logging.getLogger("hookline.plain")

# The keys that this loop follows. Another key that is set is an error: add to the loop what it means, and the key here.
FOLLOWED = """
    VERSION OUTPUT_DIR SEED CUDNN_BENCHMARK DETERMINISTIC FLOAT32_PRECISION MODEL DATASETS DATALOADER
    SOLVER.MAX_ITER SOLVER.OPTIMIZER SOLVER.BASE_LR SOLVER.MOMENTUM SOLVER.NESTEROV SOLVER.WEIGHT_DECAY
    SOLVER.WEIGHT_DECAY_NORM SOLVER.WEIGHT_DECAY_BIAS SOLVER.BIAS_LR_FACTOR SOLVER.PARAM_GROUPS SOLVER.CLIP_GRADIENTS
    SOLVER.LR_SCHEDULER_NAME SOLVER.LR_SCHEDULER_ARGS SOLVER.GAMMA SOLVER.STEPS SOLVER.NUM_DECAYS SOLVER.BASE_LR_END
    SOLVER.WARMUP_FACTOR SOLVER.WARMUP_ITERS SOLVER.WARMUP_METHOD SOLVER.RESCALE_INTERVAL SOLVER.CHECKPOINT_PERIOD
    TEST.EVAL_PERIOD TEST.EVALUATOR TEST.METRICS CHECKPOINT.ASYNC CHECKPOINT.MAX_TO_KEEP CHECKPOINT.BEST.METRIC
    CHECKPOINT.BEST.MODE LOG.PERIOD LOG.LEVEL
"""


def evaluate(cfg: CfgNode, model: torch.nn.Module, adapter: ModelAdapter, storage: EventStorage) -> dict[str, float]:
    """Compute the metrics of each test set, and put them into the storage."""
    results: dict = {}
    for name in map(name_of, cfg.DATASETS.TEST):
        loader, evaluator = build_test_loader(cfg, name), build_evaluator(cfg, name, targets_of=adapter.targets)
        results |= inference_on_dataset(
            model, loader, evaluator, predict=predictor(adapter, evaluator, cfg.TEST.GENERATE)
        )
    logger.info("Results:\n%s", format_results(results))
    metrics = flatten_results_dict(results)
    storage.put_scalars(**metrics, smoothing_hint=False)
    return metrics


def train(cfg: CfgNode, resume: bool) -> int:
    """Train a model. Returns the exit code, not 0 if the run was stopped before its end."""
    model, adapter = build_model(cfg), build_adapter(cfg)
    model.train()
    optimizer, loader = build_optimizer(cfg, model), build_train_loader(cfg)
    limit = cfg.DATALOADER.ITERS_PER_EPOCH or None
    epoch = limit or len(loader)
    cfg = resolve_lengths(cfg, epoch)
    scheduler = build_lr_scheduler(cfg, optimizer)
    batches = EpochIterator(loader, limit)
    parts = {"optimizer": optimizer, "scheduler": scheduler, "data": batches}
    checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, asynchronous=cfg.CHECKPOINT.ASYNC, **parts)
    weights = {"strict": cfg.MODEL.WEIGHTS_STRICT, "weights_from": cfg.MODEL.WEIGHTS_FROM}
    loaded = checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume, **weights)
    start_iter, best = loaded.get("iteration", -1) + 1, loaded.get("best")

    device, max_iter = resolve_device(cfg.MODEL.DEVICE), cfg.SOLVER.MAX_ITER
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
        while storage.iter < max_iter:
            losses: dict[str, Any] = adapter.losses(model, move_to_device(next(batches), device))
            losses.pop("num_items", None)  # some models return it, to weight micro-batches
            total = torch.zeros((), device=device) + sum(losses.values())
            if not math.isfinite(total.item()):
                raise FloatingPointError(f"the loss is {total.item():g} at iteration {storage.iter}")
            optimizer.zero_grad()
            total.backward()
            optimizer.step()

            storage.put_scalars(total_loss=total, **losses)
            storage.put_scalar("lr", optimizer.param_groups[0]["lr"], smoothing_hint=False)
            scheduler.step()
            done = storage.iter + 1
            if done % eval_period == 0 and done < max_iter:
                best = save_best(cfg, evaluate(cfg, model, adapter, storage), best, checkpointer)
            if done % log_period == 0 or done == max_iter:
                for writer in writers:
                    writer.write()
            periodic_checkpointer.step(storage.iter, best=best)
            storage.iter = done
            if stop.reason and done < max_iter:
                logger.info("Training ended at iteration %d: %s", done, stop.reason)
                checkpointer.save(f"model_{done - 1:07d}", iteration=done - 1, best=best)
                break
        else:
            save_best(cfg, evaluate(cfg, model, adapter, storage), best, checkpointer)
            for writer in writers:
                writer.write()
    for writer in writers:
        writer.close()
    checkpointer.wait()
    return stop.exit_code if storage.iter < max_iter else 0


def save_best(cfg: CfgNode, metrics: dict[str, float], best: float | None, checkpointer: Checkpointer) -> float | None:
    """Save ``model_best`` if CHECKPOINT.BEST.METRIC has improved, and return the best value so far."""
    metric = cfg.CHECKPOINT.BEST.METRIC
    sign = 1 if mode_of(metric, cfg.CHECKPOINT.BEST.MODE) == "max" else -1
    if metric and metric not in metrics:
        raise ConfigError(f"CHECKPOINT.BEST.METRIC: {metric!r} is not among {', '.join(metrics) or 'no results'}")
    if metric and (best is None or sign * metrics[metric] > sign * best):
        best = metrics[metric]
        checkpointer.save("model_best", tag_last=False, **dict[str, Any]({metric: best}))
    return best


def main() -> None:
    """Train as the command line says."""
    args = default_argument_parser().parse_args()
    for option in ("eval_only", "predict", "dry_run"):
        if getattr(args, option):
            raise ConfigError(f"--{option.replace('_', '-')}: this loop has no such option; train_net.py has")
    if args.num_gpus * args.num_machines > 1 or launched_by_torchrun():
        raise ConfigError(f"--num-gpus {args.num_gpus}: this loop trains in one process; train_net.py in several")
    cfg = get_cfg()
    if args.config_file:
        cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    followed = [f"{name}." for name in FOLLOWED.split()]
    names = [key for key in cfg.diff(get_cfg()) if not f"{key}.".startswith(tuple(followed))]
    if names:
        raise ConfigError(f"{', '.join(names)}: this loop does not follow the key; leave it out, or use train_net.py")
    check_config(cfg)
    default_setup(cfg, args)
    raise SystemExit(train(cfg, args.resume))


if __name__ == "__main__":
    with config_errors_exit():
        main()
