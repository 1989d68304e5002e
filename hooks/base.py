"""``HookBase``: the events of a run, and what a hook may use of the trainer."""

from collections.abc import Mapping
from typing import Any, Protocol

from ..config import Registry
from .event_storage import EventStorage

__all__ = ["EVENTS", "HOOK_REGISTRY", "STEP_EVENTS", "HookBase", "StopTraining"]

# fmt: off
STEP_EVENTS: tuple[str, ...] = (
    "before_fetch", "after_fetch", "before_forward", "after_forward", "before_backward", "after_backward",
    "before_optimizer_step", "after_optimizer_step", "before_zero_grad", "after_zero_grad",
)
"""The events that ``run_step`` emits."""

EVENTS: tuple[str, ...] = (
    "on_registered", "before_train", "after_train", "before_epoch", "after_epoch", "before_step", "after_step",
    *STEP_EVENTS,
    "before_eval", "before_eval_step", "after_eval_step", "on_eval_end", "after_eval",
    "before_predict", "on_predict_end", "after_predict", "before_sanity_check", "after_sanity_check",
    "before_save", "after_save", "after_load", "after_write", "on_exception",
    "on_eval", "before_write", "on_write", "on_save", "on_extra_save", "after_run",
)
"""All events: the methods of :class:`HookBase` that a trainer calls."""
# fmt: on


class StopTraining(Exception):
    """Raise it in a hook to stop after the current step, as ``trainer.request_stop(reason)`` does.

    The step is finished and counts, also if the event is in the middle of it. Raised in the model or ``run_step``,
    StopTraining discards the step and stops training at once. Then all ranks must raise it in the same step.
    """


class _AnyTrainer(Protocol):
    """The types of the attributes that hooks use most. A trainer has many more; they may be of any type."""

    iter: int
    start_iter: int
    max_iter: int
    storage: EventStorage

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...


class HookBase:
    """Base class of hooks. Override the events you need::

        before_train()
        while trainer.iter < trainer.max_iter:
            before_epoch()                        # at the first step of an epoch
            before_step()
            trainer.run_step():
                before_fetch(); after_fetch(batch)
                before_forward(batch); after_forward(batch, outputs)    # these two lines
                before_backward(losses); after_backward()               # for each micro-batch
                before_optimizer_step(); after_optimizer_step()
                before_zero_grad(); after_zero_grad()
            after_step()
            after_epoch()                         # at the last step of an epoch
            on_eval(); before_write(); on_write(); on_save(); on_extra_save()     # what was requested
        on_exception(error)                       # if a step or a hook raised one
        after_train()                             # always
        before_write(); on_write()                # always: the last metrics, those of after_train included
        on_save()                                 # the last checkpoint, unless a step failed
        after_run()                               # always

    Evaluation, prediction and checkpoints have events too. ``trainer.emit("name", ...)`` calls the method ``name`` of
    every hook that has it. An event that no hook overrides costs nothing. Do heavy work in ``after_step``: the time
    from ``before_step`` to ``after_step`` is logged as the step's time.

    Attributes:
        trainer: a weak reference to the trainer, set at registration.
        after, before: hook classes (or their names) that must be earlier, or later, in the trainer's list.
        single: whether a trainer may have only one hook of this class.
        uses_outputs: whether the hook reads ``trainer.batch`` and ``trainer.outputs``, which are kept only then.
        uses_indices: the same for ``trainer.sample_indices``.
        state_key: the key of the hook's state in a checkpoint. Default: the class name, then ``Name#2``, ``Name#3``.
    """

    trainer: _AnyTrainer = None  # type: ignore[assignment]  # set at registration
    after: tuple[type | str, ...] = ()
    before: tuple[type | str, ...] = ()
    single: bool = False
    uses_outputs: bool = False
    uses_indices: bool = False
    state_key: str | None = None

    def on_registered(self) -> None:
        """After the hook was added to ``self.trainer``."""

    def before_train(self) -> None:
        """Once, before the first step. ``trainer.iter == trainer.start_iter``."""

    def after_train(self) -> None:
        """Once, after the last step, also after an error. After a complete run ``trainer.iter == trainer.max_iter``."""

    def before_epoch(self) -> None:
        """Before the first step of each epoch, and before the first step of a resumed run."""

    def after_epoch(self) -> None:
        """After the last step of each epoch."""

    def before_step(self) -> None:
        """Before each iteration."""

    def after_step(self) -> None:
        """After each iteration, which is one optimizer update."""

    def before_fetch(self) -> None:
        """Before a batch is read."""

    def after_fetch(self, batch: Any) -> None:
        """After a batch was read. It may be changed in place."""

    def before_forward(self, batch: Any) -> None:
        """Before the forward pass of each micro-batch."""

    def after_forward(self, batch: Any, outputs: Any) -> None:
        """After the forward pass of each micro-batch; ``outputs`` is the dict of losses."""

    def before_backward(self, losses: Any) -> None:
        """Before the backward pass of each micro-batch; ``losses`` is the scalar tensor that is differentiated."""

    def after_backward(self) -> None:
        """After each backward pass, before unscaling and clipping. The last one of a step exchanges gradients."""

    def before_optimizer_step(self) -> None:
        """Before the optimizer's step. Gradients are accumulated, unscaled and clipped."""

    def after_optimizer_step(self) -> None:
        """After the weights were updated."""

    def before_zero_grad(self) -> None:
        """Before gradients are cleared."""

    def after_zero_grad(self) -> None:
        """After gradients were cleared."""

    def before_eval(self) -> None:
        """Before an evaluation of the test sets."""

    def before_eval_step(self, batch: Any) -> None:
        """Before each batch of an evaluation."""

    def after_eval_step(self, batch: Any, outputs: Any) -> None:
        """After each batch of an evaluation."""

    def on_eval_end(self) -> None:
        """After the last batch of an evaluation, also if it failed: restore what ``before_eval`` changed."""

    def after_eval(self, results: Mapping[str, Any]) -> None:
        """After an evaluation, with its results by test set and metric."""

    def before_predict(self) -> None:
        """Before predictions are made."""

    def on_predict_end(self) -> None:
        """After the last prediction, also if one failed: restore what ``before_predict`` changed."""

    def after_predict(self, results: Any) -> None:
        """After all predictions were made."""

    def before_sanity_check(self) -> None:
        """Before a few test batches are tried, ahead of training."""

    def after_sanity_check(self, results: Any) -> None:
        """After a few test batches were tried."""

    def before_save(self, path: str) -> None:
        """Before a checkpoint is written to ``path``."""

    def after_save(self, path: str) -> None:
        """After a checkpoint was written to ``path``."""

    def after_load(self, path: str) -> None:
        """After the run's state was loaded from ``path``."""

    def after_write(self, metrics: Mapping[str, float]) -> None:
        """After metrics were passed to the writers."""

    def on_exception(self, error: BaseException) -> None:
        """Training ends with ``error`` (KeyboardInterrupt included). ``after_train`` follows."""

    def on_eval(self) -> None:
        """At the end of a step in which an evaluation was requested: :class:`EvalHook` evaluates."""

    def before_write(self) -> None:
        """Before metrics are written, after ``on_eval``: put metrics that are computed only then."""

    def on_write(self) -> None:
        """Write metrics: :class:`PeriodicWriter` does."""

    def on_save(self) -> None:
        """Save a checkpoint, after ``on_write``: :class:`PeriodicCheckpointer` does."""

    def on_extra_save(self) -> None:
        """Save more, after ``on_save``: :class:`RollingCheckpointer` does."""

    def after_run(self) -> None:
        """Once, at the very end: metrics and the last checkpoint are written."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the hook needs after a resume: plain data and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""

    def reset_state(self) -> None:
        """Forget what :meth:`state_dict` returns: another trainer has the hook now, or ``train()`` starts over."""


HOOK_REGISTRY: Registry = Registry("HOOK", HookBase, "hookline.hooks")
"""Hooks that a config's ``HOOKS`` list can name."""
