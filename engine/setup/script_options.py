"""Options that a script parses and then ignores, and the short trial of a run."""

from typing import Any

from ...config import CfgNode, ConfigError
from .. import comm


def option(args: object, name: str) -> Any:
    """Return the value of one of hookline's options; None if the script has an option of its own with that name."""
    return getattr(args, name, None) if name in getattr(args, "ours", ()) else None


def check_ignored(args: object, *names: str) -> None:
    """Raise a ConfigError if the command line has one of these options, which the script does not handle."""
    for name in names:
        value = option(args, name)
        if value is not None and value is not False:  # --replay 0 is one
            raise ConfigError(
                f"--{name.replace('_', '-')}: this script ignores the option; end it with run(Trainer, args), which "
                "handles all, or call launch(main, args.num_gpus, ...) and trainer.resume_or_load(resume=args.resume)"
            )


def check_processes(args: object) -> None:
    """Raise a ConfigError if there are fewer processes than the command line asks for."""
    asked = {name: option(args, name) or 1 for name in ("num_gpus", "num_machines")}
    if asked["num_gpus"] * asked["num_machines"] > comm.get_world_size():
        check_ignored(args, *(name for name, number in asked.items() if number > 1))


def check_fast_dev_run(cfg: object, args: object) -> None:
    """Raise a ConfigError if an option contradicts FAST_DEV_RUN."""
    for name in ("resume", "eval_only", "predict"):
        if isinstance(cfg, CfgNode) and cfg.FAST_DEV_RUN and option(args, name):
            raise ConfigError(
                f"FAST_DEV_RUN: tries a new run, so leave out --{name.replace('_', '-')}; to start from "
                "weights, set MODEL.WEIGHTS"
            )


def shorten(cfg: CfgNode) -> None:
    """Make a config that of the trial run: one epoch of FAST_DEV_RUN iterations, then one evaluation.

    Nothing is written: no checkpoints, and metrics go to the console only.
    """
    loader, number = cfg.DATALOADER, cfg.FAST_DEV_RUN
    for section, name in ((loader, "ITERS_PER_EPOCH"), (cfg.TEST.PRECISE_BN, "NUM_ITER")):
        section[name] = min(section[name], number)
    for name in ("LIMIT_TRAIN_BATCHES", "LIMIT_TEST_BATCHES"):
        loader[name] = min(loader[name] or number, number)
    never = ["SOLVER.WARMUP_ITERS", "SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD"]
    never += ["CHECKPOINT.BEST.PERIOD", "CHECKPOINT.ROLLING.PERIOD"]
    off = ["TEST.EVAL_ON_START", "CHECKPOINT.LOAD_BEST_AT_END", "CHECKPOINT.ON_EXCEPTION"]
    changes = {"SOLVER.MAX_ITER": number, "TEST.EXPECTED_RESULTS": [], "LOG.WRITERS": ["CommonMetricPrinter"]}
    changes |= {"LOG.PERIOD": 1, **dict.fromkeys(never, 0), **dict.fromkeys(off, False)}
    cfg.merge_from_list([part for pair in changes.items() for part in pair])
