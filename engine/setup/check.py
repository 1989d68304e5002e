"""Checks of a config before a run."""

import logging
from collections.abc import Collection
from contextlib import nullcontext

from ...config import CfgNode, ConfigError, Duration, get_cfg, name_of
from ...config.components import ComponentKey, errors_at
from ...config.errors import misspelt
from ...config.values import is_object_text
from ...hooks import HOOK_REGISTRY, WRITER_REGISTRY
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
    _check_values(cfg, overridden)
    for error in _errors(cfg, overridden).values():
        raise error


def check_for_script(cfg: CfgNode) -> dict[str, ConfigError]:
    """Check a config as :func:`check_config` does, but for components that the script may build itself.

    Such a component has a name that hookline does not know: a script may name it as it likes, as in detectron2. Names
    that are probably misspelt, names of modules, and names with arguments are meant for hookline.

    Returns:
        The error of each such component, by the name of the method that builds it.

    Raises:
        ConfigError: as :func:`check_config`.
    """
    _check_values(cfg)
    found = {}
    for (builder, component_key), error in _errors(cfg).items():
        known = [name for name, _ in component_key.registry]
        if not builder or any(_is_meant(name, args, known) for name, args, _ in component_key.entries(cfg)):
            raise error
        found[builder] = error
    return found


def _is_meant(name: str, args: object, known: Collection[str]) -> bool:
    """Whether a name and its arguments are meant for hookline, although it cannot build them."""
    # A known name without arguments that it needs may be that of a sampler which the script builds itself.
    return bool(args) or is_object_text(name) or ":" in name or (name not in known and bool(misspelt(name, known)))


def _errors(cfg: CfgNode, overridden: Collection[str] = ()) -> dict[tuple[str, ComponentKey], ConfigError]:
    """Return the error of each component that is wrong."""
    errors = {}
    parts = solver_parts(cfg) if cfg.SOLVER.OPTIMIZERS else {}
    for builder, component_key in COMPONENT_KEYS:
        if builder in overridden or (builder == "build_evaluator" and "test" in overridden):
            continue
        of_parts = parts and component_key in (OPTIMIZER_KEY, SCHEDULE_KEY)
        try:
            for name, part in parts.items() if of_parts else [("", cfg)]:
                with errors_at(f"SOLVER.OPTIMIZERS.{name}") if name else nullcontext():
                    targets = component_key.check(part)
            for target in targets if component_key is MODEL_KEY and cfg.MODEL.INPUT_MAPPING else ():
                check_input_mapping(cfg, target)
        except ConfigError as error:
            errors[builder, component_key] = error
    return errors


def _check_values(cfg: CfgNode, overridden: Collection[str] = ()) -> None:
    """Check values that have the right type but make no sense."""
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
    if cfg.SOLVER.COMPILE_STEP or cfg.SOLVER.COMPILE_STEP_ARGS:
        from ..step.compiled_step import check_step_config  # only where it is used

        check_step_config(cfg)
