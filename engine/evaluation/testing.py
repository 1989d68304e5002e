"""Evaluation on all of DATASETS.TEST, its check before training, and its results."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, SupportsFloat

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...config import CfgNode, ConfigError, UnknownKeyError, name_of, suggest
from ...config.values import ObjectName, kind_of, mode_of
from ...hooks import EarlyStopping
from ...hooks.common import optimizer_in_eval_mode, preserve_rng, schedulers_of, unwrap_model
from ...hooks.evaluation import EvalResults, names_function
from ...hooks.evaluation import flatten_names as flatten_results_dict
from ...hooks.hook_list import hook_name
from .. import comm
from ..data.build import NoTrainData, check_same_length
from ..data.datasets import DATASET_REGISTRY
from ..modeling import ModelAdapter, resolve_device
from ..modeling.build import loss_module_of
from ..modeling.model_options import copied_buffers
from ..modeling.outputs import Terms
from .build import EVALUATOR_KEY, METRICS_KEY, build_metrics
from .evaluator import (
    Batch,
    Builder,
    DatasetEvaluator,
    EvaluatedTrainer,
    Outputs,
    Predict,
    Results,
    evaluates_for_trainer,
    evaluation_context,
    inference_context,
    inference_on_dataset,
    scratch_storage,
)
from .metrics import Loss

logger = logging.getLogger(__name__)


@preserve_rng()
def evaluate_test_sets(
    cfg: CfgNode,
    model: nn.Module,
    evaluators: DatasetEvaluator | Sequence[DatasetEvaluator] | None,
    parts: Builder,
) -> Results:
    """See :meth:`DefaultTrainer.test`. ``parts`` is the trainer's class, or another object with its ``build_*``."""
    names = list(map(name_of, cfg.DATASETS.TEST))
    given = [evaluators] if isinstance(evaluators, DatasetEvaluator) else evaluators
    if given is not None and len(given) != len(names):
        raise ConfigError(f"DATASETS.TEST has {len(names)} sets, but {len(given)} evaluators were given")
    device, adapter = resolve_device(cfg.MODEL.DEVICE), parts.build_adapter(cfg)
    if not evaluates_for_trainer() and not getattr(cfg.MODEL.LOSS.NAME, "is_component", False):
        loss = loss_module_of(getattr(adapter, "loss", None), model)
        if loss is not None and loss.named_parameters():
            logger.warning(
                "MODEL.LOSS has parameters, and those of this evaluation are new: a metric Loss is not that of the "
                "trained loss. trainer.evaluate() uses the trainer's"
            )
    results: Results = {}
    for index, name in enumerate(names):
        loader = check_same_length(parts.build_test_loader(cfg, name), f"DATASETS.TEST ({name})")
        try:
            evaluator = given[index] if given is not None else parts.build_evaluator(cfg, name)
        except NotImplementedError:
            logger.warning("%s is not evaluated: build_evaluator() raises NotImplementedError", name)
            continue
        found = inference_on_dataset(
            model,
            loader,
            evaluator,
            predict=predictor(adapter, evaluator, cfg.TEST.GENERATE),
            device=device,
            name=name,
            progress_bar=cfg.LOG.PROGRESS_BAR,
        )
        found = comm.broadcast_object(found)  # an evaluator may return results on rank 0 only
        if set(found) <= {name}:
            results.update(found)
        elif len(names) == 1:
            results = dict(found)
        else:
            results[name] = found
    if results and comm.is_main_process() and not evaluates_for_trainer():  # a trainer logs its results itself
        logger.info("Results:\n%s", format_results(results))
        print_csv_format(results)
    return results


def evaluate(
    trainer: EvaluatedTrainer, test: Callable[[], Mapping[str, Any]], max_batches: int | None = None
) -> Mapping[str, Any]:
    """See :meth:`DefaultTrainer.evaluate`."""
    if max_batches is not None:
        cfg = trainer.cfg.thawed()
        settings = cfg.DATALOADER
        settings.LIMIT_TEST_BATCHES = min(settings.LIMIT_TEST_BATCHES or max_batches, max_batches)
        settings.NUM_WORKERS = min(settings.NUM_WORKERS, 1)
        with preserve_rng(), evaluation_context(None, max_batches):
            return results_of(trainer, cfg)
    with scratch_storage(trainer.iter), preserve_rng(), optimizer_in_eval_mode(trainer.optimizer):
        try:
            trainer.emit("before_eval")
            results = test()
        finally:
            trainer.emit("on_eval_end")
        trainer.emit("after_eval", EvalResults(flatten_results_dict(results)))
    return results


def results_of(trainer: EvaluatedTrainer, cfg: CfgNode) -> Results:
    """Return the results of a DefaultTrainer's ``test()``, on all ranks."""
    if not cfg.DATASETS.TEST:
        return {}
    trainer.move_modules()
    trainer.strategy.before_evaluation(trainer.model)
    with optimizer_in_eval_mode(trainer.optimizer), trained_loss(trainer, cfg) as cfg:
        # Without the wrapper: its collectives would hang, since ranks may have different numbers of batches.
        results: Results = trainer.test(cfg, unwrap_model(trainer.model))
    return comm.broadcast_object(results)  # a subclass's test() may return results on rank 0 only


@contextmanager
def trained_loss(trainer: EvaluatedTrainer, cfg: CfgNode) -> Iterator[CfgNode]:
    """Return a config whose evaluations use the trainer's loss, in eval mode, if that has parameters or buffers."""
    if trainer.loss_module is None:
        yield cfg
        return
    cfg = cfg.thawed()
    cfg.MODEL.LOSS = CfgNode({"NAME": ObjectName(trainer.adapter.loss, is_component=True), "ARGS": {}})
    loss = trainer.loss_module.module
    with inference_context(loss), copied_buffers(loss.modules()):
        yield cfg


def predictor(adapter: ModelAdapter, evaluator: Any, settings: Mapping[str, object] | None = None) -> Predict:
    """Return the function that predicts a batch.

    It passes the model's own losses to an evaluator that needs them. For one that asks for generated outputs, by an
    attribute ``generates``, it calls ``model.generate()`` with ``settings``, instead of or beside the forward pass.
    """
    needs_losses, generates = getattr(evaluator, "needs_losses", False), getattr(evaluator, "generates", False)
    if not needs_losses and not generates:
        return adapter.predict

    def predict(model: nn.Module, batch: Batch) -> Outputs:
        if generates:
            evaluator.generated = adapter.generate(model, batch, settings or {})
            if not needs_losses and not getattr(evaluator, "needs_outputs", False):
                return evaluator.generated
        if not needs_losses:
            return adapter.predict(model, batch)
        with Terms():
            outputs, evaluator.losses = adapter.predict_with_losses(model, batch)
        return outputs

    return predict


def sanity_check(trainer: EvaluatedTrainer, overridden: Collection[str]) -> None:
    """Evaluate a few batches of each test set, so that an error there appears before anything is written.

    Checks that the metrics that the config and ``EarlyStopping`` name are among the results. Does not put the results
    into the storage. Emits ``before_sanity_check`` and ``after_sanity_check(results)``.

    Args:
        trainer: a DefaultTrainer.
        overridden: the methods that its class overrides. An own ``test`` is not tried: nothing is known of its cost.

    Raises:
        UnknownKeyError: there is no metric of a name.
    """
    cfg = trainer.cfg
    num_batches = 0 if "test" in overridden or not cfg.DATASETS.TEST else cfg.TEST.SANITY_CHECK_BATCHES
    if not num_batches:
        return
    trainer.emit("before_sanity_check")
    start = time.perf_counter()
    try:
        results = trainer.evaluate(max_batches=num_batches)
    except Exception as error:
        error.add_note("in the check of a few test batches before training (TEST.SANITY_CHECK_BATCHES: 0 skips it)")
        raise
    logger.debug("Sanity check of %d test batches passed (%.2g s)", num_batches, time.perf_counter() - start)
    if "build_evaluator" not in overridden and EVALUATOR_KEY.name(cfg) == "MetricsEvaluator":
        _check_names(trainer, results)
    trainer.emit("after_sanity_check", results)


def _check_names(trainer: EvaluatedTrainer, results: Mapping[str, Any]) -> None:
    """Check that metrics that are named exist, by the results of a few batches.

    A watched metric may also come from training or from a hook. It is an error if it names a test set or resembles a
    metric of one, or is the schedule's. If any other never appears, EarlyStopping and the best checkpoint warn.

    It is also an error if more of a loss's term would count as better because of its name, such as "dice".
    """
    cfg, names = trainer.cfg, [f"{test_set}/{metric}" for test_set, metrics in results.items() for metric in metrics]
    modules = [kind_of(metric).__module__.partition(".")[0] for metric in METRICS_KEY.check(cfg)]
    foreign = [module not in ("hookline", "torchmetrics") for module in modules]
    terms: set[str] = set()  # of the loss
    if any(foreign) or max(map(len, results.values()), default=0) > len(modules):
        with preserve_rng():  # a metric may draw
            metrics = build_metrics(cfg)
        has_all = all(metrics.keys() <= found.keys() for found in results.values())
        others = {name for name in names if name.partition("/")[2] not in metrics}
        if has_all and any(isinstance(metric, Loss) for metric in metrics.values()):
            terms = others
        own = tuple(compress(metrics, foreign))
        by_class = any(name.partition("/")[2].startswith(own) for name in terms)  # as "dice_0" of a function dice
        if any(foreign) and (not has_all or others != terms or by_class):
            return  # one of them gave numbers by name, and may give others for other batches
    known, sets = ", ".join(names), {*map(name_of, cfg.DATASETS.TEST), *dict(DATASET_REGISTRY)}
    best, solver = cfg.CHECKPOINT.BEST, cfg.SOLVER
    plateau = any(isinstance(one, ReduceLROnPlateau) for one in schedulers_of(trainer.scheduler))
    scheduled = solver.LR_SCHEDULER_METRIC if plateau else ""
    watched = [
        ("CHECKPOINT.BEST.METRIC", best.METRIC, best.MODE),
        ("SOLVER.LR_SCHEDULER_METRIC", scheduled, solver.LR_SCHEDULER_ARGS.get("mode", "auto")),
        *((f"{hook_name(hook)} of HOOKS", hook.metric, hook.given_mode) for hook in trainer.find_hooks(EarlyStopping)),
    ]
    if isinstance(trainer.data_loader, NoTrainData):  # only evaluates, and perhaps on other sets than the training did
        watched = []
    expected = [f"{test_set}/{metric}" if test_set else metric for test_set, metric, *_ in cfg.TEST.EXPECTED_RESULTS]
    for key, metric, mode in [*watched, *(("TEST.EXPECTED_RESULTS", name, "min") for name in expected)]:
        is_more = metric in terms and mode == "auto" and mode_of(metric) == "max"
        if is_more and (metric != best.METRIC or best.MODE == "auto"):
            raise ConfigError(
                f"{key}: {metric} is a term of the loss, but its name does not say that less of it is better; set the "
                'mode to "min" (MODE; monitor_mode of Trainer; mode of a hook or schedule)'
            )
        is_there = any(metric == name or metric.startswith(f"{name}/") for name in names)
        if not metric or is_there or names_function(metric):
            continue
        test_set, slash, _ = metric.partition("/")
        near = suggest(metric, names)
        resembles = near or any(name.endswith(f"/{metric}") for name in names)
        may_be_of_training = not slash and ("loss" in metric or metric == best.METRIC)
        is_missing = metric in expected or (metric == scheduled and metric not in ("loss", "total_loss"))
        if test_set in sets or is_missing or (resembles and not may_be_of_training):
            raise UnknownKeyError(f"{key}: there is no metric {metric!r} among {known}{near}")


def print_csv_format(results: Mapping[str, object]) -> None:
    """Log results in lines that can be pasted into a spreadsheet.

    Args:
        results: metrics by task, ``{"digits_test": {"accuracy": 0.99}}``; or a number beside the tasks.
    """
    for task, values in results.items():
        if not isinstance(values, Mapping):
            logger.info("copypaste: %s=%s", task, values)
            continue
        flat = flatten_results_dict(values)
        logger.info("copypaste: Task: %s", task)
        logger.info("copypaste: %s", ",".join(flat))
        logger.info("copypaste: %s", ",".join(_text(value, ".4f") for value in flat.values()))


def _text(value: object, spec: str) -> str:
    """Format a number; other results of an evaluator are shown as they are."""
    return format(float(value), spec) if isinstance(value, SupportsFloat) else str(value)


def verify_results(cfg: CfgNode, results: Mapping[str, object]) -> bool:
    """Compare results with ``cfg.TEST.EXPECTED_RESULTS``, and log those that are missed.

    Args:
        cfg: the whole config; an expectation is [set, metric, value, tolerance]. The set is "" for results without one.
        results: metrics by set.

    Returns:
        True: each expected metric exists, is finite and within its tolerance.

    Raises:
        SystemExit: an expected result was missed; the exit code is 1.
    """
    flat = flatten_results_dict(results)
    misses = []
    for task, metric, expected, tolerance in cfg.TEST.EXPECTED_RESULTS:
        name = f"{task}/{metric}" if task else metric
        if name not in flat:
            misses.append(f"{name} is not among the results ({', '.join(flat) or 'there are none'})")
        elif not (math.isfinite(flat[name]) and abs(flat[name] - expected) <= tolerance):
            misses.append(f"{name} is {flat[name]:.6g}, expected {expected:.6g} within {tolerance:.6g}")
    for miss in misses:
        logger.error("TEST.EXPECTED_RESULTS: %s", miss)
    if misses:
        raise SystemExit(1)
    if cfg.TEST.EXPECTED_RESULTS:
        logger.info("All %d expected results are met", len(cfg.TEST.EXPECTED_RESULTS))
    return True


def format_results(results: Mapping[str, object]) -> str:
    """Results as a table: a line for each test set and metric.

    Args:
        results: metrics by set, ``{"digits_test": {"accuracy": 0.99}}``.
    """
    rows = [(*name.rpartition("/")[::2], _text(value, ".5g")) for name, value in flatten_results_dict(results).items()]
    rows.insert(0, ("set", "metric", "value"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
    lines.insert(1, "  " + "-" * (sum(widths) + 4))
    return "\n".join(lines)
