"""``FAST_DEV_RUN``: a few steps and an evaluation on a few batches, to see whether a run works. Writes no files."""

from typing import Any

from ...config import CfgNode, ConfigError
from .ignored import option

__all__ = ["choose_fast_dev_run", "shortened"]


def choose_fast_dev_run(cfg: Any, args: Any) -> None:
    """Set FAST_DEV_RUN to 1 if the command line has ``--fast-dev-run`` and the key is 0.

    Raises:
        ConfigError: another option contradicts it.
    """
    if not isinstance(cfg, CfgNode):
        if option(args, "fast_dev_run"):
            raise ConfigError("--fast-dev-run: is for YAML configs; set train.max_iter of a LazyConfig")
        return
    if option(args, "fast_dev_run") and not cfg.FAST_DEV_RUN:
        frozen = cfg.is_frozen()
        cfg.defrost()
        cfg.FAST_DEV_RUN = 1
        if frozen:
            cfg.freeze()
    if not cfg.FAST_DEV_RUN:
        return
    for name in ("resume", "eval_only", "predict"):
        if option(args, name):
            raise ConfigError(
                f"FAST_DEV_RUN: tries a new run, so leave out --{name.replace('_', '-')}; to start from "
                "weights, set MODEL.WEIGHTS"
            )


def shortened(cfg: CfgNode) -> CfgNode:
    """Return the config of the trial run: one epoch of FAST_DEV_RUN iterations, then one evaluation.

    Nothing is written: no checkpoints, and metrics go to the console only.
    """
    cfg, frozen, number = cfg.clone(), cfg.is_frozen(), cfg.FAST_DEV_RUN
    cfg.defrost()
    loader = cfg.DATALOADER
    for key in ("LIMIT_TRAIN_BATCHES", "LIMIT_TEST_BATCHES"):
        loader[key] = min(loader[key] or number, number)
    loader.ITERS_PER_EPOCH = min(loader.ITERS_PER_EPOCH, number)
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.WARMUP_ITERS = number, 0
    cfg.SOLVER.CHECKPOINT_PERIOD = cfg.TEST.EVAL_PERIOD = cfg.CHECKPOINT.BEST.PERIOD = 0
    cfg.CHECKPOINT.ROLLING.PERIOD = 0
    cfg.TEST.EVAL_ON_START = False
    cfg.TEST.PRECISE_BN.NUM_ITER = min(cfg.TEST.PRECISE_BN.NUM_ITER, number)
    cfg.TEST.SANITY_CHECK_BATCHES = 0  # the evaluation follows soon
    cfg.TEST.EVAL_ON_START = False
    cfg.TEST.EXPECTED_RESULTS = []
    cfg.CHECKPOINT.LOAD_BEST_AT_END = cfg.CHECKPOINT.ON_EXCEPTION = False
    cfg.LOG.WRITERS, cfg.LOG.PERIOD = ["CommonMetricPrinter"], 1
    if frozen:
        cfg.freeze()
    return cfg
