"""Checks of a config before a run."""

import logging
from collections.abc import Collection
from typing import Any

import torch

from ...config import CfgNode, ConfigError, Duration, UnknownKeyError, get_cfg, name_of, suggest
from ...config.components import Slot, errors_at
from ...config.errors import misspelt
from ...config.signatures import fits
from ...config.values import ObjectName, is_object_text
from ...hooks import (
    HOOK_REGISTRY,
    WRITER_REGISTRY,
    CallbackHook,
    EarlyStopping,
    EvalHook,
    check_hooks,
)
from ...hooks.common import preserve_rng
from ...hooks.evaluation import Monitor, names_function
from ...hooks.functions import FunctionHook
from ..checkpoint import Checkpointer
from ..checkpoint.find_checkpoint import find_checkpoint
from ..checkpoint.matching import split_query
from ..data.build import SAMPLER_SLOT, check_data
from ..data.datasets import DATASET_REGISTRY, TEST_SLOT, TRAIN_SLOT
from ..evaluation import check_evaluation, result_names
from ..evaluation.build import EVALUATOR_SLOT
from ..modeling import check_model
from ..modeling.build import LOSS_SLOT, MODEL_SLOT
from ..parallel.base import check_parallel
from ..solver import check_solver
from ..solver.build import OPTIMIZER_SLOT
from ..solver.multi_optimizer import solver_parts
from ..solver.schedules import SCHEDULE_SLOT, plateau_metric

__all__ = [
    "HOOK_SLOT",
    "WRITER_SLOT",
    "best_metric",
    "check_config",
    "check_watched",
    "overridden_builders",
    "unknown_parts",
]

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
        cfg = cfg.thawed()
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
        _check_step,
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
    if cfg.SOLVER.ACCUMULATION_STEPS > cfg.DATALOADER.BATCH_SIZE and not cfg.DATALOADER.MAX_TOKENS:
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
    for expectation in cfg.TEST.EXPECTED_RESULTS:
        if not fits(expectation, tuple[str, str, float, float]):
            raise ConfigError(f"TEST.EXPECTED_RESULTS: {expectation!r} is not [set, metric, expected value, tolerance]")


def _check_builds(cfg: CfgNode) -> None:
    """Build the parts that are cheap to build, so that their constructors check their arguments."""
    if cfg.MODEL.NAME and not isinstance(cfg.MODEL.NAME, ObjectName):  # an object, or a function that may be slow
        _try_model(cfg)
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


def _check_hooks(cfg: CfgNode) -> None:
    HOOK_SLOT.check(cfg)
    for index, (name, _, _) in enumerate(HOOK_SLOT.entries(cfg)):
        if name in ("IterationTimer", "SignalHandler", "LRScheduler"):
            raise ConfigError(f"HOOKS[{index}]: every run already has one {name}; remove this one")
        if name == "TimeLimit" and Duration.parse(cfg.SOLVER.TIME_LIMIT):
            raise ConfigError(f"HOOKS[{index}]: SOLVER.TIME_LIMIT already adds a TimeLimit; remove one of them")
    offered = {**dict.fromkeys(HOOK_SLOT.offers), "checkpointer": Checkpointer(torch.nn.Module())}
    ours = _build_ours(cfg, HOOK_SLOT, offered)
    try:
        check_hooks(ours)
    except ConfigError as error:
        raise ConfigError(f"HOOKS: {error}") from None


def _check_writers(cfg: CfgNode) -> None:
    offered = {"cfg": cfg, "output_dir": cfg.OUTPUT_DIR, "max_iter": None, "window_size": 20}
    _build_ours(cfg, WRITER_SLOT, offered)


def _build_ours(cfg: CfgNode, slot: Slot, offered: dict[str, Any]) -> list[Any]:
    """Check the components of a slot, and build those of hookline, whose arguments or packages may be wrong.

    Others are not built: constructors may have side effects, such as starting a tracker's run.
    """
    built = []
    for index, (kind, (name, args, key)) in enumerate(zip(slot.check(cfg), slot.entries(cfg), strict=True)):
        if kind.__module__.startswith("hookline."):
            with errors_at(f"{slot.key}[{index}]"):
                built.append(slot.registry.build(name, args, offered=offered, key=key))
    return built


def _check_step(cfg: CfgNode) -> None:
    clip = cfg.SOLVER.CLIP_GRADIENTS
    if not clip.ENABLED and clip != get_cfg().SOLVER.CLIP_GRADIENTS:
        logger.warning("SOLVER.CLIP_GRADIENTS: nothing is clipped, since its ENABLED is False")
    if cfg.SOLVER.COMPILE_STEP or cfg.SOLVER.COMPILE_STEP_ARGS:
        from ..step.compiled_step import check_step_config  # only where it is used

        check_step_config(cfg)


def _check_weights(cfg: CfgNode) -> None:
    path = cfg.MODEL.WEIGHTS
    if not path or "://" in path:
        return
    with errors_at("MODEL.WEIGHTS"):
        find_checkpoint(split_query(path)[0])  # it is read when it is loaded


def _check_monitors(cfg: CfgNode) -> None:
    """Check that evaluations produce the metrics that keys and hooks watch, if the default evaluator is used.

    A metric may also come from training or from a hook. It is an error if it names a test set or resembles a metric of
    one. If any other never appears, EarlyStopping and the schedule fail, and the best checkpoint logs a warning.
    """
    best = cfg.CHECKPOINT.BEST.METRIC
    watched = {"CHECKPOINT.BEST.METRIC": best, "SOLVER.LR_SCHEDULER_METRIC": plateau_metric(cfg)}
    for name, args, key in HOOK_SLOT.entries(cfg):
        stopping = name.value if isinstance(name, ObjectName) else None
        if name == "EarlyStopping" or isinstance(stopping, EarlyStopping):
            metric = args.get("metric", "") if stopping is None else stopping._monitor.function or stopping.metric
            if not metric and not best:
                raise ConfigError(
                    f"{key}.metric: is missing, and so is CHECKPOINT.BEST.METRIC (Trainer(monitor=...)), which is its "
                    "default"
                )
            watched[f"{key}.metric"] = metric or best
    for key, metric in watched.items():
        with errors_at(key):
            Monitor(metric)  # finds the function of "module:function"
    if watched["SOLVER.LR_SCHEDULER_METRIC"] and not Duration.parse(cfg.TEST.EVAL_PERIOD) and not cfg.HOOKS:
        raise ConfigError(
            "TEST.EVAL_PERIOD: is 0, so the only evaluation is at the end and SOLVER.LR_SCHEDULER_METRIC has no "
            'effect; set it, for example to "1ep"'
        )
    metrics, others = result_names(cfg)
    if others or EVALUATOR_SLOT.name(cfg) != "MetricsEvaluator":  # the names are known afterwards
        return
    test_sets = [name_of(entry) for entry in cfg.DATASETS.TEST]
    names = [f"{test_set}/{metric}" for test_set in test_sets for metric in metrics]
    for key, metric in watched.items():
        if not metric or callable(metric) or names_function(metric) or _is_among(metric, names):
            continue
        prefix, slash, _ = metric.partition("/")
        if metric == best and not cfg.DATASETS.TEST:
            continue
        near = suggest(metric, names)
        of_an_evaluation = slash or (key != "CHECKPOINT.BEST.METRIC" and "loss" not in metric)
        of_a_set = (near and of_an_evaluation) or prefix in test_sets or prefix in DATASET_REGISTRY
        if of_a_set or key == "SOLVER.LR_SCHEDULER_METRIC" or (metric in metrics and "loss" not in metric):
            known = ", ".join(names) or "none (DATASETS.TEST or TEST.METRICS is empty)"
            raise UnknownKeyError(f"{key}: there is no metric {metric!r} among {known}{near}")


def check_watched(trainer: Any) -> None:
    """Check after the first step of a DefaultTrainer that the metrics which hooks watch can come.

    A metric ``<set>/<name>`` of no test set comes from the model, which has put it in the first step, or from a hook of
    the project. Hooks of hookline put none with such a name.

    Raises:
        ConfigError: nothing gives a metric.
    """
    cfg, hooks, sets = trainer.cfg, trainer.hooks.hooks, [name_of(entry) for entry in trainer.cfg.DATASETS.TEST]
    ours = all(type(hook).__module__.startswith("hookline.") for hook in hooks)
    if not ours or len(trainer.find_hooks(EvalHook)) > 1 or any(map(trainer.find_hooks, (CallbackHook, FunctionHook))):
        return
    watched = {f"EarlyStopping(metric={hook.metric!r})": hook._monitor for hook in trainer.find_hooks(EarlyStopping)}
    if metric := plateau_metric(cfg):
        watched["SOLVER.LR_SCHEDULER_METRIC"] = Monitor(metric)
    if best := cfg.CHECKPOINT.BEST.METRIC:
        watched["CHECKPOINT.BEST.METRIC"] = Monitor(best)
    for key, monitor in watched.items():
        test_set, slash, _ = monitor.name.rpartition("/")
        if monitor.function is not None or not slash or monitor.name in trainer.storage.histories():
            continue
        if any(f"{test_set}/".startswith(f"{one}/") for one in sets):
            if key.startswith("EarlyStopping") and not Duration.parse(cfg.TEST.EVAL_PERIOD):
                logger.warning("%s stops nothing: TEST.EVAL_PERIOD is 0, so the only evaluation is at the end", key)
            continue
        problem = (
            f"{key}: nothing gives the metric {monitor.name!r}: there is no such test set (DATASETS.TEST, "
            f"Trainer: test_data, has {', '.join(sets) or 'none'}), and the model has not put it"
        )
        if key != "CHECKPOINT.BEST.METRIC" or cfg.CHECKPOINT.LOAD_BEST_AT_END:
            raise ConfigError(problem)
        logger.warning("%s", problem)


def _check_expected_results(cfg: CfgNode) -> None:
    """Check that evaluations produce the results that are expected, if the default evaluator is used."""
    metrics, others = result_names(cfg) if cfg.TEST.EXPECTED_RESULTS else ([], True)
    if others or EVALUATOR_SLOT.name(cfg) != "MetricsEvaluator":
        return
    names = [f"{name_of(entry)}/{metric}" for entry in cfg.DATASETS.TEST for metric in metrics]
    for test_set, metric, *_ in cfg.TEST.EXPECTED_RESULTS:
        name = f"{test_set}/{metric}" if test_set else metric
        if not _is_among(name, names):
            known = ", ".join(names) or "nothing (DATASETS.TEST is empty)"
            raise UnknownKeyError(f"TEST.EXPECTED_RESULTS: there is no {name!r} among {known}{suggest(name, names)}")


def _is_among(metric: str, names: Collection[str]) -> bool:
    """Whether a metric is one of these, or an entry of one with several values."""
    return any(metric == name or metric.startswith(f"{name}/") for name in names)
