"""Names of events in other libraries, so that a ported callback whose methods are never called is noticed."""

from collections.abc import Iterator

from .base import HookBase

__all__ = ["foreign_events"]

# The names of an event in transformers, pytorch-accelerated, fastNLP, Lightning and MMEngine.
_EVENTS = {
    "before_train": "on_train_begin on_train_start on_training_run_start",
    "after_train": "on_train_end on_training_run_end",
    "before_epoch": "on_epoch_begin on_train_epoch_start on_train_epoch_begin before_train_epoch",
    "after_epoch": "on_epoch_end on_train_epoch_end after_train_epoch",
    "before_step": "on_step_begin on_train_step_start on_train_batch_start on_train_batch_begin before_train_iter",
    "after_step": "on_step_end on_train_step_end on_train_batch_end after_train_iter",
    "before_backward": "on_before_backward",
    "after_backward": "on_after_backward",
    "before_optimizer_step": "on_pre_optimizer_step on_before_optimizers_step on_before_optimizer_step",
    "after_optimizer_step": "on_optimizer_step on_after_optimizers_step",
    "before_zero_grad": "on_before_zero_grad",
    "before_eval": "on_evaluate_begin on_evaluation_run_start on_validation_start before_val on_eval_epoch_start",
    "after_eval": "on_evaluate on_evaluate_end on_evaluation_run_end on_validation_end after_val_epoch "
    "on_eval_epoch_end on_training_run_epoch_end",
    "after_write": "on_log",
    "before_predict": "on_predict_start",
}
_NAMES = {name: event for event, names in _EVENTS.items() for name in names.split()}


def foreign_events(hook: HookBase) -> Iterator[tuple[str, str]]:
    """Yield the hook's methods that are events of other libraries, each with the event here."""
    for name, event in _NAMES.items():
        if callable(getattr(type(hook), name, None)):
            yield name, event
