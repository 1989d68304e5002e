"""Evaluation on all of DATASETS.TEST."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ...config import CfgNode, ConfigError, name_of
from ...config.components import period_of
from .. import comm
from ..data.build import check_same_length
from ..modeling import ModelAdapter, resolve_device
from .evaluator import DatasetEvaluator, evaluates_for_trainer, inference_on_dataset
from .testing import format_results, print_csv_format

__all__ = ["evaluate_sets", "evaluate_test_sets", "own_periods", "predictor", "sets_of_period"]

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
