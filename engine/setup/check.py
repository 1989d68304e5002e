"""Checks of a config before a run."""

import logging
from collections.abc import Collection
from typing import Any

from ...config import CfgNode, ConfigError, Duration, UnknownKeyError, get_cfg, name_of, suggest
from ...config.components import ComponentKey, errors_at
from ...config.errors import misspelt
from ...config.values import is_object_text
from ...hooks import HOOK_REGISTRY, WRITER_REGISTRY, EarlyStopping
from ...hooks.evaluation import names_function
from ..checkpoint.find_checkpoint import find_checkpoint
from ..checkpoint.matching import split_query
from ..data.build import SAMPLER_KEY, check_data
from ..data.datasets import DATASET_REGISTRY, TEST_KEY, TRAIN_KEY
from ..evaluation import check_evaluation, result_names
from ..evaluation.build import EVALUATOR_KEY
from ..modeling import check_model
from ..modeling.build import MODEL_KEY
from ..parallel.base import check_parallel
from ..solver import check_solver
from ..solver.build import OPTIMIZER_KEY
from ..solver.schedules import SCHEDULE_KEY, plateau_metric

logger = logging.getLogger(__name__)

HOOK_KEY = ComponentKey(
    HOOK_REGISTRY, "HOOKS", offers=("cfg", "checkpointer", "model", "optimizer", "eval_function", "output_dir")
)
WRITER_KEY = ComponentKey(WRITER_REGISTRY, "LOG.WRITERS", offers=("cfg", "output_dir", "max_iter", "window_size"))


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
    ("build_model", MODEL_KEY),
    ("build_optimizer", OPTIMIZER_KEY),
    ("build_lr_scheduler", SCHEDULE_KEY),
    ("build_train_loader", TRAIN_KEY),
    ("build_train_loader", SAMPLER_KEY),
    ("build_test_loader", TEST_KEY),
    ("build_evaluator", EVALUATOR_KEY),
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
    for builder, component_key in _NAMED_BY:
        try:
            component_key.check(cfg)
        except ConfigError as error:
            known = [name for name, _ in component_key.registry]
            if not any(_is_meant(name, args, known) for name, args, _ in component_key.entries(cfg)):
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
    if overridden:
        cfg = cfg.thawed()
        if "build_optimizer" in overridden:  # the subclass's own optimizer may be a string
            cfg.SOLVER.OPTIMIZER = get_cfg().SOLVER.OPTIMIZER
        if not {"build_evaluator", "test"}.isdisjoint(overridden):
            cfg.TEST.EVALUATOR = get_cfg().TEST.EVALUATOR
        cfg.merge_from_list([part for name in overridden for part in _BUILT_FROM.get(name, ())])
    _check_values(cfg)
    check_model(cfg)
    check_data(cfg)
    check_solver(cfg)
    check_evaluation(cfg)
    check_parallel(cfg)
    _check_hooks(cfg)
    WRITER_KEY.check(cfg)
    if {"build_test_loader", "build_evaluator", "test"}.isdisjoint(overridden):
        _check_metrics(cfg)
    _check_weights(cfg)


def _check_values(cfg: CfgNode) -> None:
    """Check values that have the right type but make no sense."""
    if get_cfg().VERSION != cfg.VERSION:
        hint = " (detectron2's number: leave it out)" if cfg.VERSION == 2 else ""
        raise ConfigError(f"VERSION: this hookline reads version {get_cfg().VERSION}, not {cfg.VERSION}{hint}")
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
    for expectation in cfg.TEST.EXPECTED_RESULTS:
        if not isinstance(expectation, list | tuple) or len(expectation) != 4:
            raise ConfigError(f"TEST.EXPECTED_RESULTS: {expectation!r} is not [set, metric, expected value, tolerance]")
        for number in expectation[2:]:
            if not isinstance(number, int | float):
                raise ConfigError(f"TEST.EXPECTED_RESULTS: {number!r} in {expectation!r} is not a number")
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
    if not clip.ENABLED and clip != get_cfg().SOLVER.CLIP_GRADIENTS:
        logger.warning("SOLVER.CLIP_GRADIENTS: nothing is clipped, since its ENABLED is False")
    if cfg.SOLVER.COMPILE_STEP or cfg.SOLVER.COMPILE_STEP_ARGS:
        from ..step.compiled_step import check_step_config  # only where it is used

        check_step_config(cfg)


def _check_hooks(cfg: CfgNode) -> None:
    HOOK_KEY.check(cfg)
    for index, (name, _, _) in enumerate(HOOK_KEY.entries(cfg)):
        if name in ("IterationTimer", "SignalHandler", "LRScheduler"):
            raise ConfigError(f"HOOKS[{index}]: every run already has one {name}; remove this one")
        if name == "TimeLimit" and Duration.parse(cfg.SOLVER.TIME_LIMIT):
            raise ConfigError(f"HOOKS[{index}]: SOLVER.TIME_LIMIT already adds a TimeLimit; remove one of them")


def _check_weights(cfg: CfgNode) -> None:
    path = cfg.MODEL.WEIGHTS
    if not path or "://" in path:
        return
    with errors_at("MODEL.WEIGHTS"):
        find_checkpoint(split_query(path)[0])  # it is read when it is loaded


def _check_metrics(cfg: CfgNode) -> None:
    """Check that the default evaluator produces the metrics that keys and hooks watch, and the expected results.

    A watched metric may also come from training or from a hook. It is an error if it names a test set or resembles a
    metric of one. If any other never appears, EarlyStopping and the schedule fail, and the best checkpoint logs a
    warning.
    """
    best, scheduled = cfg.CHECKPOINT.BEST.METRIC, plateau_metric(cfg)
    watched = {"CHECKPOINT.BEST.METRIC": best, "SOLVER.LR_SCHEDULER_METRIC": scheduled}
    for name, args, key in HOOK_KEY.entries(cfg):
        hook = getattr(name, "value", None)  # of an object in place of a name
        if name == "EarlyStopping" or isinstance(hook, EarlyStopping):
            watched[f"{key}.metric"] = hook.metric if isinstance(hook, EarlyStopping) else args.get("metric")
    if scheduled and not Duration.parse(cfg.TEST.EVAL_PERIOD) and not cfg.HOOKS:
        raise ConfigError(
            "TEST.EVAL_PERIOD: is 0, so the only evaluation is at the end and SOLVER.LR_SCHEDULER_METRIC has no "
            'effect; set it, for example to "1ep"'
        )
    metrics, others = result_names(cfg)
    if others or EVALUATOR_KEY.name(cfg) != "MetricsEvaluator":  # the names are known afterwards
        return
    names = [f"{name_of(entry)}/{metric}" for entry in cfg.DATASETS.TEST for metric in metrics]
    known = ", ".join(names) or "none (DATASETS.TEST or TEST.METRICS is empty)"
    sets = {*map(name_of, cfg.DATASETS.TEST), *dict(DATASET_REGISTRY)}
    for key, metric in watched.items():
        if not metric or callable(metric) or names_function(metric) or _is_among(metric, names):
            continue
        if not cfg.DATASETS.TEST and (cfg.HOOKS or key == "CHECKPOINT.BEST.METRIC"):
            continue
        test_set, slash, _ = metric.partition("/")
        may_be_of_training = not slash and ("loss" in metric or metric == best)
        near = suggest(metric, names)
        is_unknown = test_set in sets or ((near or metric in metrics) and not may_be_of_training)
        if is_unknown or metric == scheduled:
            raise UnknownKeyError(f"{key}: there is no metric {metric!r} among {known}{near}")
    for test_set, metric, *_ in cfg.TEST.EXPECTED_RESULTS:
        name = f"{test_set}/{metric}" if test_set else metric
        if not _is_among(name, names):
            raise UnknownKeyError(f"TEST.EXPECTED_RESULTS: there is no {name!r} among {known}{suggest(name, names)}")


def _is_among(metric: str, names: Collection[str]) -> bool:
    """Whether a metric is one of these, or an entry of one with several values."""
    return any(metric == name or metric.startswith(f"{name}/") for name in names)
