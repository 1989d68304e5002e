"""Evaluation on all of DATASETS.TEST, its trial before training, and its results."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, SupportsFloat

from torch import nn

from ...config import CfgNode, ConfigError, name_of
from ...config.components import period_of
from ...hooks.common.rng import preserve_rng
from ...hooks.evaluation import flatten_names as flatten_results_dict
from .. import comm
from ..data.build import check_same_length
from ..modeling import ModelAdapter, resolve_device
from .evaluator import DatasetEvaluator, evaluates_for_trainer, evaluation_context, inference_on_dataset

__all__ = [
    "evaluate_sets",
    "evaluate_test_sets",
    "flatten_results_dict",
    "format_results",
    "own_periods",
    "predictor",
    "print_csv_format",
    "sanity_check_batches",
    "sets_of_period",
    "trial",
    "verify_results",
]

logger = logging.getLogger(__name__)


def evaluate_test_sets(
    cfg: CfgNode,
    model: nn.Module,
    evaluators: DatasetEvaluator | Sequence[DatasetEvaluator] | None,
    parts: Any,
) -> dict[str, Any]:
    """See :meth:`DefaultTrainer.test`. ``parts`` is the trainer's class, or another object with its ``build_*``."""
    names = [name_of(entry) for entry in cfg.DATASETS.TEST]
    given = [evaluators] if isinstance(evaluators, DatasetEvaluator) else evaluators
    if given is not None and len(given) != len(names):
        raise ConfigError(f"DATASETS.TEST has {len(names)} sets, but {len(given)} evaluators were given")
    device, adapter = resolve_device(cfg.MODEL.DEVICE), parts.build_adapter(cfg)
    results: dict[str, Any] = {}
    for index, name in enumerate(names):
        loader = check_same_length(parts.build_test_loader(cfg, name), f"DATASETS.TEST ({name})")
        try:
            evaluator = given[index] if given is not None else parts.build_evaluator(cfg, name)
        except NotImplementedError:
            logger.warning("%s is not evaluated: build_evaluator() raises NotImplementedError", name)
            continue
        found = inference_on_dataset(model, loader, evaluator, predict=predictor(adapter, evaluator), device=device)
        found = comm.broadcast_object(found)  # an evaluator may return results on rank 0 only
        if set(found) == {name}:
            results.update(found)
        elif len(names) == 1:
            results = dict(found)
        else:
            results[name] = found
    if results and comm.is_main_process() and not evaluates_for_trainer():  # a trainer logs its results itself
        logger.info("Results:\n%s", format_results(results))
        print_csv_format(results)
    return results


def own_periods(cfg: CfgNode) -> list[Any]:
    """Return the different values of EVAL_PERIOD in DATASETS.TEST."""
    return list(dict.fromkeys(period for entry in cfg.DATASETS.TEST if (period := period_of(entry)) is not None))


def sets_of_period(cfg: CfgNode, period: Any = None) -> CfgNode:
    """Return a config with only those of DATASETS.TEST that are evaluated every ``period``.

    Args:
        cfg: the full config.
        period: an EVAL_PERIOD; None: the sets without one, which are evaluated every TEST.EVAL_PERIOD.
    """
    if not own_periods(cfg):
        return cfg
    cfg, frozen = cfg.clone(), cfg.is_frozen()
    cfg.defrost()
    cfg.DATASETS.TEST = tuple(entry for entry in cfg.DATASETS.TEST if period_of(entry) == period)
    if frozen:
        cfg.freeze()
    return cfg


def evaluate_sets(trainer: Any, period: Any) -> Any:
    """Evaluate a DefaultTrainer's test sets of one period; see :func:`sets_of_period`."""
    return trainer._test(sets_of_period(trainer.cfg, period))


def predictor(adapter: ModelAdapter, evaluator: Any) -> Callable[[Any, Any], Any]:
    """Return the function that predicts a batch. It passes the model's own losses to an evaluator that needs them."""
    if not getattr(evaluator, "needs_losses", False):
        return adapter.predict

    def predict(model: Any, batch: Any) -> Any:
        outputs, evaluator.losses = adapter.predict_with_losses(model, batch)
        return outputs

    return predict


@contextmanager
def trial(cfg: CfgNode, max_batches: int, gpus: Iterable[int] = ()) -> Iterator[CfgNode]:
    """Make evaluations within the block short and without effects on the run.

    Every :func:`inference_on_dataset` runs at most ``max_batches``, and emits no events. The global random generators
    are restored at the end.

    Args:
        cfg: the full config.
        max_batches: batches of each data set.
        gpus: GPUs whose generators are restored too.

    Returns:
        A config whose loaders read only so many batches, in at most one worker.
    """
    cfg = cfg.clone()
    cfg.defrost()
    settings = cfg.DATALOADER
    settings.LIMIT_TEST_BATCHES = min(settings.LIMIT_TEST_BATCHES or max_batches, max_batches)
    settings.NUM_WORKERS = min(settings.NUM_WORKERS, 1)
    cfg.freeze()
    with preserve_rng(gpus), evaluation_context(lambda *args: None, max_batches):
        yield cfg


def sanity_check_batches(cfg: CfgNode, overridden: Collection[str]) -> int:
    """Number of test batches to try before training; 0 for none.

    Args:
        cfg: the full config.
        overridden: methods that a subclass of DefaultTrainer overrides. Nothing is known of the cost of its own
            ``test``, so that is not called before training.
    """
    if not cfg.DATASETS.TEST or "test" in overridden or "SanityCheck" in map(name_of, cfg.HOOKS):
        return 0
    return int(cfg.TEST.SANITY_CHECK_BATCHES)


def print_csv_format(results: Mapping[str, Any]) -> None:
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


def _text(value: Any, spec: str) -> str:
    """Format a number; other results of an evaluator are shown as they are."""
    return format(float(value), spec) if isinstance(value, SupportsFloat) else str(value)


def verify_results(cfg: CfgNode, results: Mapping[str, Any]) -> bool:
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


def format_results(results: Mapping[str, Any]) -> str:
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
