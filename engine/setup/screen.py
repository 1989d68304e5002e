"""What a run logs at its start and its end."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...hooks.common.models import unwrap_model
from ...hooks.common.tensors import has_shards
from ...hooks.hook_list import hook_name
from .. import comm
from ..evaluation import format_results
from ..modeling.summary import model_summary, watching_forward
from ..train_loop import TrainResult
from .next_steps import best_checkpoint, next_steps
from .report import describe_data

__all__ = ["log_end", "log_start", "watching_model"]

logger = logging.getLogger(__name__)


def log_start(trainer: Any, length: str, first: bool) -> None:
    """Log data, length, hooks and model of a run.

    Args:
        trainer: a DefaultTrainer.
        length: of the run, as text.
        first: whether the trainer has not trained before.
    """
    if first:
        passes = trainer._passes
        what = " (shapes and FLOPs of a batch of the sanity check)" if passes else ""
        logger.info("Data: %s", describe_data(trainer))
        logger.info("Model%s:\n%s", what, model_summary(unwrap_model(trainer.model), passes))
        logger.info("Hooks: %s", ", ".join(hook_name(hook) for hook in trainer._hooks))
    samples, device = trainer.cfg.DATALOADER.BATCH_SIZE, trainer.device or trainer._device_type()
    logger.info("Training for %s, %d samples each, on %s", length, samples, device)


@contextmanager
def watching_model(trainer: Any) -> Iterator[None]:
    """Note shapes and FLOPs of the first batch in the block for the table of the model, before the first training.

    The strategy may check the model's outputs in the block, see ``Strategy.checking``.
    """
    model = unwrap_model(trainer.model)
    with trainer.strategy.checking(model):
        if trainer._passes is not None or trainer._result is not None or has_shards(model):
            yield
            return
        with watching_forward(model) as trainer._passes:
            yield


def log_end(trainer: Any, result: TrainResult) -> None:
    """Log the results, the best checkpoint, and how to go on."""
    if not comm.is_main_process():
        return
    if trainer._last_eval_results:
        logger.info("Results:\n%s", format_results(trainer._last_eval_results))
    start = trainer._start
    if start is None or start.kind == "trial":
        return
    if best := best_checkpoint(trainer):
        logger.info("%s", best)
    if steps := next_steps(trainer, result, start.program):
        logger.info("Next:\n%s", steps)
