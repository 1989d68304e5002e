"""Checks before a run: of its config, of the options of its command line, and that all ranks have the same."""

import logging
import platform
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch

import hookline

from ...config import CfgNode, ConfigError, Duration, get_cfg, name_of
from ...config.components import ComponentKey, errors_at
from ...hooks import HOOK_REGISTRY, WRITER_REGISTRY
from .. import comm
from ..checkpoint.find_checkpoint import find_checkpoint
from ..checkpoint.matching import split_query
from ..data.build import COLLATE_KEY, SAMPLER_KEY, TRAIN_COLLATE_KEY
from ..data.datasets import DATASET_REGISTRY, TEST_KEY, TRAIN_KEY
from ..evaluation.build import EVALUATOR_KEY, METRICS_KEY
from ..modeling.build import LOSS_KEY, MODEL_KEY, check_input_mapping, resolve_device
from ..parallel.base import STRATEGY_KEY
from ..solver.build import OPTIMIZER_KEY
from ..solver.multi_optimizer import solver_parts
from ..solver.schedules import SCHEDULE_KEY

logger = logging.getLogger(__name__)

HOOK_KEY = ComponentKey(
    HOOK_REGISTRY, "HOOKS", offers=("cfg", "checkpointer", "model", "optimizer", "eval_function", "output_dir")
)
WRITER_KEY = ComponentKey(WRITER_REGISTRY, "LOG.WRITERS", offers=("cfg", "output_dir", "max_iter", "window_size"))


# Each key with the method of DefaultTrainer that builds from it; a subclass may override that.
COMPONENT_KEYS: tuple[tuple[str, ComponentKey], ...] = (
    ("build_model", MODEL_KEY),
    ("", LOSS_KEY),
    ("build_train_loader", TRAIN_KEY),
    ("build_train_loader", SAMPLER_KEY),
    ("build_test_loader", TEST_KEY),
    ("", COLLATE_KEY),
    ("build_train_loader", TRAIN_COLLATE_KEY),
    ("build_optimizer", OPTIMIZER_KEY),
    ("build_lr_scheduler", SCHEDULE_KEY),
    ("build_evaluator", EVALUATOR_KEY),
    ("build_evaluator", METRICS_KEY),
    ("", STRATEGY_KEY),
    ("", HOOK_KEY),
    ("", WRITER_KEY),
)
_BUILT_IN = ("IterationTimer", "LRScheduler", "SignalHandler")  # hooks of every DefaultTrainer
_BUILDERS = {*dict(COMPONENT_KEYS), "test"} - {""}


def best_metric(cfg: CfgNode) -> str:
    """Return CHECKPOINT.BEST.METRIC. If it needs a test set and there is none, log a warning and return ""."""
    metric = cfg.CHECKPOINT.BEST.METRIC
    if cfg.DATASETS.TEST or metric.partition("/")[0] not in DATASET_REGISTRY:
        return metric
    logger.warning("CHECKPOINT.BEST.METRIC: DATASETS.TEST is empty, so there is no best %s", metric)
    return ""


def overridden_builders(cls: type, base: type) -> set[str]:
    """Return the names of the ``build_*`` methods and ``test`` of ``base`` (DefaultTrainer) that ``cls`` overrides."""
    subclasses = cls.__mro__[: cls.__mro__.index(base)]
    return _BUILDERS & set().union(*map(vars, subclasses))


def check_config(cfg: CfgNode, overridden: Collection[str] = ()) -> None:
    """Check a config before any data is read or any file is written.

    Components must exist, and their arguments must fit their signatures. Empty names are not checked: a script may
    build those parts itself. What else can be wrong, the builders say.

    Args:
        cfg: the full config.
        overridden: names of methods, such as "build_model", that a subclass of DefaultTrainer overrides. The components
            that the original methods build are not checked.

    Raises:
        ConfigError: the config is invalid. The message names the key and the remedy.
    """
    check_values(cfg, overridden)
    check_components(cfg, overridden)


def check_components(cfg: CfgNode, overridden: Collection[str] = ()) -> None:
    """Check the names and arguments of components; see :func:`check_config`."""
    parts = solver_parts(cfg) if cfg.SOLVER.OPTIMIZERS else {}
    for builder, component_key in COMPONENT_KEYS:
        if builder in overridden or (builder == "build_evaluator" and "test" in overridden):
            continue
        of_parts = parts and component_key in (OPTIMIZER_KEY, SCHEDULE_KEY)
        for name, part in parts.items() if of_parts else [("", cfg)]:
            with errors_at(f"SOLVER.OPTIMIZERS.{name}") if name else nullcontext():
                targets = component_key.check(part)
        if component_key is MODEL_KEY and cfg.MODEL.INPUT_MAPPING:
            for target in targets:
                check_input_mapping(cfg, target)


def check_values(cfg: CfgNode, overridden: Collection[str] = ()) -> None:
    """Check values that have the right type but make no sense; see :func:`check_config`."""
    defaults = get_cfg()
    if cfg.VERSION != defaults.VERSION:
        hint = " (detectron2's number: leave it out)" if cfg.VERSION == 2 else ""
        raise ConfigError(f"VERSION: this hookline reads version {defaults.VERSION}, not {cfg.VERSION}{hint}")
    if cfg.SOLVER.ACCUMULATION_STEPS > cfg.DATALOADER.BATCH_SIZE and not cfg.DATALOADER.MAX_TOKENS:
        raise ConfigError(
            f"SOLVER.ACCUMULATION_STEPS: a batch of {cfg.DATALOADER.BATCH_SIZE} samples (DATALOADER.BATCH_SIZE) cannot "
            f"be cut into {cfg.SOLVER.ACCUMULATION_STEPS} micro-batches"
        )
    if cfg.CHECKPOINT.LOAD_BEST_AT_END and not cfg.CHECKPOINT.BEST.METRIC:
        raise ConfigError(
            "CHECKPOINT.LOAD_BEST_AT_END: needs CHECKPOINT.BEST.METRIC, the metric that decides which weights are best"
        )
    if cfg.MODEL.WEIGHTS_OPTIMIZER and not cfg.MODEL.WEIGHTS:
        raise ConfigError("MODEL.WEIGHTS_OPTIMIZER: needs MODEL.WEIGHTS, the checkpoint to load the state from")
    if cfg.TEST.AUG.ENABLED:
        raise ConfigError("TEST.AUG.ENABLED: there is no test-time augmentation; override the trainer's test()")
    for expected in cfg.TEST.EXPECTED_RESULTS:
        is_list = isinstance(expected, list | tuple) and len(expected) == 4
        if not (is_list and all(isinstance(number, int | float) for number in expected[2:])):
            raise ConfigError(f"TEST.EXPECTED_RESULTS: {expected!r} is not [set, metric, expected value, tolerance]")
    for index, (name, _, _) in enumerate(HOOK_KEY.entries(cfg)):
        if name in _BUILT_IN or (name == "TimeLimit" and Duration.parse(cfg.SOLVER.TIME_LIMIT)):
            raise ConfigError(f"HOOKS[{index}]: this run already has a hook {name}; remove this one")
    resolve_device(cfg.MODEL.DEVICE)
    names = list(map(name_of, cfg.DATASETS.TEST))
    for name in names:
        if names.count(name) > 1 and {"build_test_loader", "test"}.isdisjoint(overridden):
            raise ConfigError(
                f"DATASETS.TEST names {name!r} twice, and metrics are named after their test set: "
                f'give one of them another name, {{NAME: "{name}", AS: "other"}}'
            )
    if cfg.DETERMINISTIC and cfg.CUDNN_BENCHMARK:
        raise ConfigError("DETERMINISTIC and CUDNN_BENCHMARK: contradict each other; set one of them to False")
    if not cfg.OUTPUT_DIR:
        raise ConfigError("OUTPUT_DIR: is empty; give the run a folder")
    if "://" in cfg.OUTPUT_DIR:
        raise ConfigError(
            f"OUTPUT_DIR: {cfg.OUTPUT_DIR} is a URI; a run writes to a local folder. Copy the files when it has "
            "ended, or save checkpoints there with your own Checkpointer"
        )
    clip = cfg.SOLVER.CLIP_GRADIENTS
    if not clip.ENABLED and clip != defaults.SOLVER.CLIP_GRADIENTS:
        logger.warning("SOLVER.CLIP_GRADIENTS: nothing is clipped, since its ENABLED is False")
    by_metrics = cfg.TEST.GENERATE and EVALUATOR_KEY.name(cfg) == "MetricsEvaluator"  # others may have the attribute
    if by_metrics and not any(getattr(metric, "generates", False) for metric in METRICS_KEY.check(cfg)):
        logger.warning("TEST.GENERATE: no metric has generates = True, so evaluations do not use it")
    if cfg.MODEL.WEIGHTS and "://" not in cfg.MODEL.WEIGHTS:
        with errors_at("MODEL.WEIGHTS"):
            find_checkpoint(split_query(cfg.MODEL.WEIGHTS)[0])  # it is read when it is loaded


# ---------------------------------------------------------------------- the command line


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


def check_command(cfg: object, args: object) -> None:
    """Raise a ConfigError if there are fewer processes than the command line asks for, or the config contradicts it."""
    asked = {name: option(args, name) or 1 for name in ("num_gpus", "num_machines")}
    if asked["num_gpus"] * asked["num_machines"] > comm.get_world_size():
        check_ignored(args, *(name for name, number in asked.items() if number > 1))
    for name in ("resume", "eval_only", "predict"):
        if isinstance(cfg, CfgNode) and cfg.FAST_DEV_RUN and option(args, name):
            raise ConfigError(
                f"FAST_DEV_RUN: tries a new run, so leave out --{name.replace('_', '-')}; to start from "
                "weights, set MODEL.WEIGHTS"
            )


def check_handled(args: object, resume: bool | str | None, is_needed: bool) -> None:
    """Check that the script handles the options of its command line, before it trains.

    Args:
        args: the parsed command line.
        resume: whether the script resumes the run in OUTPUT_DIR, or the path of a checkpoint; None if it did not say.
        is_needed: whether there is a checkpoint to resume from, and the script has loaded none.
    """
    check_ignored(args, "eval_only", "predict", "replay", "samples", "dry_run")
    if is_needed or resume is False or (isinstance(option(args, "resume"), str) and not isinstance(resume, str)):
        check_ignored(args, "resume")


# ---------------------------------------------------------------------- ranks


def check_same_config(cfg: CfgNode, resume: bool | str | None, args: object, text: str) -> None:
    """Check that all ranks have the same config, command line and versions. Every rank must call it.

    Args:
        cfg: the full config.
        resume: whether the run in OUTPUT_DIR is resumed, or the path of a checkpoint that is.
        args: the parsed command line.
        text: that of a LazyConfig.

    Raises:
        ConfigError: a rank differs from rank 0. All ranks raise it, and the message lists the differences.
    """
    options = {"--resume": resume, "--eval-only": getattr(args, "eval_only", None)}
    options["--predict"] = option(args, "predict")
    options |= {f"config.yaml, line {number}": line for number, line in enumerate(text.splitlines(), start=1)}
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"hookline": hookline.__version__, "torch": torch.__version__.partition("+")[0], "Python": python}
    mine = {key: repr(value) for key, value in {**cfg.flatten(), **options, **versions}.items()}
    (_, first), *others = comm.all_gather((platform.node(), mine))
    for rank, (node, other) in enumerate(others, start=1):
        keys = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if keys:
            found = [f"{key} is {other.get(key, 'missing')} (rank 0: {first.get(key, 'missing')})" for key in keys]
            raise ConfigError(
                f"rank {rank}, on {node}, has another config than rank 0: {'; '.join(found)}. "
                "Start all machines with the same config, command line and versions"
            )


# ---------------------------------------------------------------------- FAST_DEV_RUN


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
