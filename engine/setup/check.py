"""Checks of a config before a run."""

import logging
import os
from collections.abc import Collection
from typing import Any

import torch

from ...config import CfgNode, ConfigError, Duration, UnknownKeyError, get_cfg, name_of, suggest
from ...config.components import Slot, errors_at
from ...config.errors import misspelt
from ...config.values import ObjectName, is_object_text
from ...hooks import (
    HOOK_REGISTRY,
    WRITER_REGISTRY,
    EarlyStopping,
    check_hooks,
)
from ...hooks.common.rng import preserve_rng
from ...hooks.evaluation import Monitor, names_function
from ..checkpoint.matching import split_query
from ..checkpoint.weights import check_weights
from ..data import DATASET_REGISTRY, check_data
from ..data.build import SAMPLER_SLOT
from ..data.datasets import TEST_SLOT, TRAIN_SLOT
from ..evaluation import check_evaluation, result_names
from ..evaluation.build import EVALUATOR_SLOT
from ..evaluation.testing import own_periods, sets_of_period
from ..modeling import check_model
from ..modeling.adapters import check_step_name
from ..modeling.build import LOSS_SLOT, MODEL_SLOT
from ..parallel.base import check_parallel
from ..solver import check_solver
from ..solver.build import OPTIMIZER_SLOT
from ..solver.schedules import SCHEDULE_SLOT, plateau_metric
from ..solver.several import solver_parts
from ..step.choice import check_step_config

__all__ = ["HOOK_SLOT", "WRITER_SLOT", "best_metric", "check_config", "overridden_builders", "unknown_parts"]

logger = logging.getLogger(__name__)

HOOK_SLOT = Slot(
    HOOK_REGISTRY, "HOOKS", offers=("cfg", "checkpointer", "model", "optimizer", "eval_function", "output_dir")
)
WRITER_SLOT = Slot(WRITER_REGISTRY, "LOG.WRITERS", offers=("cfg", "output_dir", "max_iter", "window_size"))


# The keys that make each method of DefaultTrainer work, each with a value that switches its check off.
_BUILT_FROM = {
    "build_model": ("MODEL.NAME", ""),
    "build_optimizer": ("SOLVER.OPTIMIZER.NAME", ""),
    "build_lr_scheduler": ("SOLVER.LR_SCHEDULER_NAME", ""),
    "build_train_loader": ("DATASETS.TRAIN", (), "DATALOADER.SAMPLER_TRAIN", "EpochSampler"),
    "build_test_loader": ("DATASETS.TEST", ()),
    "build_evaluator": ("TEST.METRICS", ()),
}

_NAMED_BY = (
    ("build_model", MODEL_SLOT),
    ("build_optimizer", OPTIMIZER_SLOT),
    ("build_lr_scheduler", SCHEDULE_SLOT),
    ("build_train_loader", TRAIN_SLOT),
    ("build_train_loader", SAMPLER_SLOT),
    ("build_test_loader", TEST_SLOT),
    ("build_evaluator", EVALUATOR_SLOT),
)


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
    return {name for name in (*_BUILT_FROM, "test") if any(name in vars(one) for one in subclasses)}


def unknown_parts(cfg: CfgNode) -> dict[str, ConfigError]:
    """Return the methods ``build_*`` whose component has a name that hookline cannot build, each with the error.

    A script that builds this part itself may name it as it likes, as in detectron2. Not returned are names that are
    probably misspelt, names of modules, and names with arguments, which are meant for hookline.
    """
    unknown: dict[str, ConfigError] = {}
    for builder, slot in _NAMED_BY:
        try:
            slot.check(cfg)
        except ConfigError as error:
            known = [name for name, _ in slot.registry]
            if not any(_is_meant(name, args, known) for name, args, _ in slot.entries(cfg)):
                unknown[builder] = error
    return unknown


def _is_meant(name: str, args: Any, known: Collection[str]) -> bool:
    """Whether a name and its arguments are meant for hookline, although it cannot build them."""
    return bool(args) or is_object_text(name) or ":" in name or bool(misspelt(name, known))


def check_config(cfg: CfgNode, overridden: Collection[str] = ()) -> None:
    """Check a config before any data is read or any file is written.

    Components must exist, their arguments must fit their signatures, and files must exist. Empty names are not
    checked: a script may build those parts itself.

    Args:
        cfg: the full config.
        overridden: names of methods, such as "build_model", that a subclass of DefaultTrainer overrides. The keys
            that the original methods read are not checked.

    Raises:
        ConfigError: the config is invalid. The message names the key and the remedy.
    """
    evaluates_otherwise = not {"build_test_loader", "build_evaluator", "test"}.isdisjoint(overridden)
    if overridden:
        cfg = cfg.clone()
        cfg.defrost()
        if "build_optimizer" in overridden:  # the subclass's own optimizer may be a string
            cfg.SOLVER.OPTIMIZER = get_cfg().SOLVER.OPTIMIZER
        if not {"build_evaluator", "test"}.isdisjoint(overridden):
            cfg.TEST.EVALUATOR = get_cfg().TEST.EVALUATOR
        cfg.merge_from_list([part for name in overridden for part in _BUILT_FROM.get(name, ())])
    for check in (
        _check_ranges,
        check_model,
        check_data,
        check_solver,
        check_evaluation,
        check_parallel,
        _check_output_dir,
        _check_hooks,
        _check_writers,
        check_step_config,
        _check_monitors,
        _check_expected_results,
        _check_weights,
        _check_builds,  # last: the first optimizer imports torch modules for a second
    ):
        if check not in (_check_monitors, _check_expected_results) or not evaluates_otherwise:
            check(cfg)


def _check_ranges(cfg: CfgNode) -> None:
    """Check values that have the right type but make no sense."""
    if get_cfg().VERSION != cfg.VERSION:
        hint = " (detectron2's number: leave it out)" if cfg.VERSION == 2 else ""
        raise ConfigError(f"VERSION: this hookline reads version {get_cfg().VERSION}, not {cfg.VERSION}{hint}")
    if cfg.SOLVER.ACCUMULATION_STEPS > cfg.DATALOADER.BATCH_SIZE:
        raise ConfigError(
            f"SOLVER.ACCUMULATION_STEPS: a batch of {cfg.DATALOADER.BATCH_SIZE} samples (DATALOADER.BATCH_SIZE) cannot "
            f"be cut into {cfg.SOLVER.ACCUMULATION_STEPS} micro-batches"
        )
    if cfg.CHECKPOINT.LOAD_BEST_AT_END and not cfg.CHECKPOINT.BEST.METRIC:
        raise ConfigError(
            "CHECKPOINT.LOAD_BEST_AT_END: needs CHECKPOINT.BEST.METRIC, the metric that decides which weights are best"
        )
    if cfg.DETERMINISTIC and cfg.CUDNN_BENCHMARK:
        raise ConfigError("DETERMINISTIC and CUDNN_BENCHMARK: contradict each other; set one of them to False")
    if cfg.MODEL.WEIGHTS_OPTIMIZER and not cfg.MODEL.WEIGHTS:
        raise ConfigError("MODEL.WEIGHTS_OPTIMIZER: needs MODEL.WEIGHTS, the checkpoint to load the state from")
    if cfg.TEST.AUG.ENABLED:
        raise ConfigError("TEST.AUG.ENABLED: there is no test-time augmentation; override the trainer's test()")
    if cfg.SOLVER.MAX_ITER in (0, "", "0"):
        raise ConfigError("SOLVER.MAX_ITER: is 0; give a length, such as 10000 or '20ep'")
    for expectation in cfg.TEST.EXPECTED_RESULTS:
        numbers = (
            isinstance(expectation, list | tuple)
            and len(expectation) == 4
            and all(isinstance(number, int | float) for number in expectation[2:])
        )
        if not numbers:
            raise ConfigError(f"TEST.EXPECTED_RESULTS: {expectation!r} is not [set, metric, expected value, tolerance]")


def _check_builds(cfg: CfgNode) -> None:
    """Build the parts that are cheap to build, so that their constructors check their arguments."""
    if cfg.MODEL.NAME and not isinstance(cfg.MODEL.NAME, ObjectName):  # an object, or a function that may be slow
        model = _try_model(cfg)
        for key in ("TRAIN_STEP", "PREDICT_STEP"):
            check_step_name(model, f"MODEL.{key}", cfg.MODEL[key])
    if cfg.MODEL.LOSS.NAME:
        LOSS_SLOT.try_build(cfg)
    for part in solver_parts(cfg).values() if cfg.SOLVER.OPTIMIZERS else [cfg]:
        if OPTIMIZER_SLOT.is_named(part):
            OPTIMIZER_SLOT.try_build(part, [torch.nn.Parameter(torch.zeros(1, 1))], lr=part.SOLVER.BASE_LR)


def _try_model(cfg: CfgNode) -> Any:
    """Build the model on the meta device; if that fails, on the CPU, since not every model supports meta."""
    with preserve_rng():
        try:
            with torch.device("meta"):
                return MODEL_SLOT.build(cfg)
        except Exception:
            return MODEL_SLOT.try_build(cfg)


def _check_output_dir(cfg: CfgNode) -> None:
    if not cfg.OUTPUT_DIR:
        raise ConfigError("OUTPUT_DIR: is empty; give the run a folder")
    if "://" in cfg.OUTPUT_DIR:
        raise ConfigError(
            f"OUTPUT_DIR: {cfg.OUTPUT_DIR} is a URI; a run writes to a local folder. Copy the files when it has "
            "ended, or save checkpoints there with your own Checkpointer"
        )
    if os.path.exists(cfg.OUTPUT_DIR) and not os.path.isdir(cfg.OUTPUT_DIR):
        raise ConfigError(f"OUTPUT_DIR: {cfg.OUTPUT_DIR} exists and is not a folder")


def _check_hooks(cfg: CfgNode) -> None:
    ours = []
    classes = HOOK_SLOT.check(cfg)
    for index, (name, args, key) in enumerate(HOOK_SLOT.entries(cfg)):
        if name in ("IterationTimer", "SignalHandler", "LRScheduler"):
            raise ConfigError(f"HOOKS[{index}]: every run already has one {name}; remove this one")
        if name == "TimeLimit" and Duration.parse(cfg.SOLVER.TIME_LIMIT):
            raise ConfigError(f"HOOKS[{index}]: SOLVER.TIME_LIMIT already adds a TimeLimit; remove one of them")
        # Do not build user hooks: constructors may have side effects, such as starting a tracker's run.
        if classes[index].__module__.startswith("hookline."):
            with errors_at(f"HOOKS[{index}]"):
                ours.append(HOOK_REGISTRY.build(name, args, offered=dict.fromkeys(HOOK_SLOT.offers), key=key))
    try:
        check_hooks(ours)
    except ConfigError as error:
        raise ConfigError(f"HOOKS: {error}") from None


def _check_writers(cfg: CfgNode) -> None:
    """Check names and arguments; build hookline's own writers, whose packages may be missing. Nothing is opened."""
    classes = WRITER_SLOT.check(cfg)
    offered = {"cfg": cfg, "output_dir": cfg.OUTPUT_DIR, "max_iter": None, "window_size": 20}
    for index, (name, args, key) in enumerate(WRITER_SLOT.entries(cfg)):
        if classes[index].__module__.startswith("hookline."):
            with errors_at(f"LOG.WRITERS[{index}]"):
                WRITER_REGISTRY.build(name, args, offered=offered, key=key)


def _check_weights(cfg: CfgNode) -> None:
    path = cfg.MODEL.WEIGHTS
    if not path or "://" in path:
        return
    with errors_at("MODEL.WEIGHTS"):
        check_weights(split_query(path)[0], cfg.MODEL.WEIGHTS_FROM)


def _monitor(cfg: CfgNode, key: str) -> str:
    if not cfg.CHECKPOINT.BEST.METRIC:
        raise ConfigError(
            f"{key}.metric: is missing, and so is CHECKPOINT.BEST.METRIC (Trainer(monitor=...)), which is its default"
        )
    return cfg.CHECKPOINT.BEST.METRIC


def _check_expected_results(cfg: CfgNode) -> None:
    """Check that evaluations produce the results that are expected, if the default evaluator is used."""
    if not cfg.TEST.EXPECTED_RESULTS or EVALUATOR_SLOT.name(cfg) != "MetricsEvaluator":
        return
    metrics, others = result_names(cfg)
    names = [f"{name_of(entry)}/{metric}" for entry in cfg.DATASETS.TEST for metric in metrics]
    for test_set, metric, *_ in cfg.TEST.EXPECTED_RESULTS:
        name = f"{test_set}/{metric}" if test_set else metric
        if not others and not any(name == one or name.startswith(f"{one}/") for one in names):
            known = ", ".join(names) or "nothing (DATASETS.TEST is empty)"
            raise UnknownKeyError(f"TEST.EXPECTED_RESULTS: there is no {name!r} among {known}{suggest(name, names)}")


def _check_monitors(cfg: CfgNode) -> None:
    """Check that evaluations produce the metrics that keys and hooks watch, if the default evaluator is used.

    CHECKPOINT.BEST.METRIC, and an EarlyStopping that has a period or watches a loss, may also watch a metric that is
    not from an evaluation. It is an error only if it names a test set or resembles a metric of one; if it never
    appears, the run logs a warning, or EarlyStopping fails.
    """
    best = "CHECKPOINT.BEST.METRIC"
    open_to_others = {best}
    plateau = "SOLVER.LR_SCHEDULER_METRIC"
    watched = {best: cfg.CHECKPOINT.BEST.METRIC, plateau: plateau_metric(cfg)}
    for name, args, key in HOOK_SLOT.entries(cfg):
        if name == "EarlyStopping":
            metric, period = args.get("metric", ""), args.get("period", 0)
        elif isinstance(name, ObjectName) and isinstance(name.value, EarlyStopping):
            metric, period = name.value._monitor.function or name.value.metric, name.value.period
        else:
            continue
        if callable(metric):
            continue
        metric = watched[f"{key}.metric"] = metric or _monitor(cfg, key)
        if Duration.parse(period) or metric.startswith("train/") or ("loss" in metric and "/" not in metric):
            open_to_others.add(f"{key}.metric")
    for key, metric in watched.items():
        with errors_at(key):
            Monitor(metric)  # finds the function of "module:function"
    watched = {key: metric for key, metric in watched.items() if metric and not names_function(metric)}
    if not watched:
        return
    test_sets = [name_of(entry) for entry in sets_of_period(cfg).DATASETS.TEST]
    own_sets = [name_of(entry) for own in own_periods(cfg) for entry in sets_of_period(cfg, own).DATASETS.TEST]
    if watched.get(plateau) and not Duration.parse(cfg.TEST.EVAL_PERIOD) and not cfg.HOOKS:
        raise ConfigError(
            "TEST.EVAL_PERIOD: is 0, so the only evaluation is at the end and SOLVER.LR_SCHEDULER_METRIC has no "
            'effect; set it, for example to "1ep"'
        )
    metrics, others = result_names(cfg)
    if test_sets and (others or EVALUATOR_SLOT.name(cfg) != "MetricsEvaluator"):  # known afterwards
        watched = {key: metric for key, metric in watched.items() if metric.partition("/")[0] in own_sets}
    names = [f"{test_set}/{metric}" for test_set in test_sets for metric in metrics]
    for key, metric in watched.items():
        prefix, slash, _ = metric.partition("/")
        if any(metric == name or metric.startswith(f"{name}/") for name in names):
            continue
        if (prefix == "train" and cfg.LOG.TRAIN_METRICS) or (key == best and not test_sets and not own_sets):
            continue
        near = suggest(metric, names) if slash or key not in open_to_others else ""
        of_a_set = prefix in test_sets or prefix in own_sets or prefix in DATASET_REGISTRY
        if key not in open_to_others or near or of_a_set:
            known = ", ".join(names) or "none (DATASETS.TEST or TEST.METRICS is empty)"
            own = "; sets with an EVAL_PERIOD of their own do not count" if prefix in own_sets else near
            raise UnknownKeyError(f"{key}: there is no metric {metric!r} among {known}{own}")
