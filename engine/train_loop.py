"""The training loop: steps, the hooks around them, and how a run ends.

The docstring of :class:`~hookline.hooks.HookBase` lists all events in order.

Requests: a hook calls ``trainer.request_save()``, ``request_write()`` or ``request_eval()``. They are served at the
end of the step, when all hooks have had their ``after_step``, so their order does not matter. With several ranks, one
rank may make a request; all ranks then serve it at the end of the same step.

Stopping: ``trainer.request_stop(reason)`` ends the loop after the current step. A hook may raise StopTraining instead.
A :class:`~hookline.hooks.SignalHandler` calls ``request_stop`` on the first Ctrl-C: the step is finished, and with it
an evaluation that is running or due; a checkpoint is saved, and the program exits with 130. After the last step, such
as in the final evaluation, the first Ctrl-C changes nothing: the run completes.

The second Ctrl-C is a KeyboardInterrupt at once. Like any error, it goes to ``on_exception``; then ``after_train``
runs, and it is raised again. Nothing is saved, but after the last step the final checkpoint is; a resume then repeats
the final evaluation. Without a SignalHandler the first Ctrl-C acts like the second.

Metrics: ``storage.iter == trainer.iter`` during a step. In ``after_train`` both are the number of finished iterations,
so a final evaluation is logged one iteration after the last step; the ``on_write`` that follows writes it. After an
error both keep the iteration that failed.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import ConfigError
from ..hooks.base import HookBase, StopTraining
from ..hooks.storage.event_storage import EventStorage
from . import comm
from .ranks.agreement import StopRequest
from .ranks.exit_error import as_failure
from .run_state import RunState

__all__ = ["HookBase", "TrainResult", "TrainerBase"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        reason: "completed", or the argument of ``request_stop``.
        iteration: number of finished iterations, including those before a resume.
        metrics: the last value of every metric.
        exit_code: exit code for the program: 0, or that of ``request_stop`` if the run was interrupted and should be
            resumed (see docs/errors.md).
    """

    reason: str
    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)
    exit_code: int = 0


class TrainerBase(RunState):
    """Calls :meth:`run_step` repeatedly, and hooks around it. Does not know about models or data.

    Attributes:
        iter: the current iteration, from ``start_iter`` to ``max_iter - 1``; the number of finished iterations when
            the loop has ended.
        start_iter: the first iteration of this run.
        max_iter: the end of the run. If it is changed during training, hooks get ``set_max_iter(max_iter)``.
        epoch: the current pass over the data, from 0.
        iters_per_epoch: iterations in one pass, or None if unknown.
        epoch_ended: whether the current step is the last of its epoch.
        storage: the :class:`~hookline.hooks.EventStorage` of the run.
        comm: the module of rank and collective functions, for hooks.
    """

    epoch: int = 0
    iters_per_epoch: int | None = None
    epoch_ended: bool = False
    comm = comm

    def __init__(self) -> None:
        super().__init__()
        self._has_state = False  # from an earlier train(), or loaded
        self._trained = False  # the state is that of an earlier train()
        self._storage_state: Mapping[str, Any] | None = None  # loaded; used by the next train()
        self._state_at_end: Mapping[str, Any] | None = None  # of the storage, at the last step of a stopped run
        self._loaded_end: Mapping[str, Any] | None = None  # how the run in the loaded checkpoint ended

    # ------------------------------------------------------------------ the loop

    def train(self, start_iter: int, max_iter: int) -> TrainResult:
        """Run iterations ``start_iter`` to ``max_iter - 1``. May be called repeatedly.

        If ``start_iter`` follows the last finished iteration, hooks continue; otherwise their state is reset
        (:meth:`HookBase.reset_state`). Weights and optimizer are used as they are.

        Args:
            start_iter: the first iteration.
            max_iter: one more than the last iteration.

        Returns:
            How the run ended.

        Raises:
            Exception: the first error of a step or a hook, after ``after_train`` of all hooks.
            RuntimeError: a step or a hook called ``sys.exit(0)``, which would hide that the run did not complete.
        """
        return self._train(start_iter, max_iter)

    def _train(self, start_iter: int, max_iter: int, stop: StopRequest | None = None) -> TrainResult:
        """Train; with ``stop``, only repeat the end of a run that was stopped before."""
        logger.info("Starting training from iteration %d", start_iter)
        self._prepare(start_iter, max_iter, stop)
        self._use_storage(EventStorage(start_iter))
        self._trained = True
        with self.storage:
            try:
                try:
                    self.before_train()
                    run_step = self.run_step
                    while self.iter < self.max_iter and self._stop is None:
                        self.before_step()
                        run_step()
                        self.after_step()
                        self.iter += 1
                except StopTraining as error:  # raised by a step; in a hook it is a request
                    self._stop_step(str(error))
            except BaseException as error:
                self._requests.clear()
                failure = self._fail(error)
                if failure is error:
                    raise
                raise failure from error
            finally:
                self.after_train()
            metrics = {name: value for name, (value, _) in self.storage.latest().items()}
        end = self._stop
        if end is None or (end.exit_code and self.completed):  # interrupted after the last step
            end = StopRequest("completed")
        logger.info("Training ended at iteration %d: %s", self.iter, end.reason)
        return TrainResult(end.reason, self.iter, metrics, end.exit_code)

    def _prepare(self, start_iter: int, max_iter: int, stop: StopRequest | None) -> None:
        """Set the state of a new run."""
        starts_over = self._has_state and start_iter != self._finished + 1
        self._has_state = True
        self.iter = self.start_iter = start_iter
        self.max_iter = self._longest = max_iter
        self._finished = start_iter - 1
        self._error, self._loaded_end, self._state_at_end, self._at_last_save = None, None, None, False
        self._start_requests(stop)
        if starts_over:
            self._reset_hooks()
            self._storage_state = None
        elif self._storage_state is None and self._trained:
            self._storage_state = self.storage.state_dict(most=10_000)
        self._start_hooks()
        self._start_agreement()
        logger.debug("Hooks, in the order they are called in:\n%s", self.describe_hooks())

    def _use_storage(self, storage: EventStorage) -> None:
        """Put metrics into ``storage``, which continues that of a resumed run."""
        self.storage = storage
        if self._storage_state is not None:
            storage.load_state_dict(self._storage_state)
            self._storage_state = None

    def before_train(self) -> None:
        self._dispatch("before_train")

    def before_epoch(self) -> None:  # called by trainers that have epochs: ModelTrainer.before_step
        self._dispatch("before_epoch")

    def before_step(self) -> None:
        self.storage.iter = self.iter
        if self._joined or self._left:
            self._change_hooks()
        self._dispatch("before_step")

    def run_step(self) -> None:
        """Run one iteration. Subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} must define run_step()")

    def after_backward(self) -> None:
        self._dispatch("after_backward")

    def after_step(self) -> None:
        self._finished = self.iter
        if self.iter == self.start_iter:
            self._first_step_done()
        self._dispatch("after_step")
        if self.epoch_ended:
            self.after_epoch()
        if self._agreement is not None:
            self._exchange_requests()
        if self._requests:
            self._serve_requests()

    def after_epoch(self) -> None:
        self._dispatch("after_epoch")

    def after_train(self) -> None:
        """End the run: call the events after the loop. If hooks raise errors, the others are still called."""
        before = self._error
        if before is None:
            self.iter = self.storage.iter = self._finished + 1
            self._attempt(self._check_state, {"on_eval", "on_save"})
        self._attempt(self._end_requests)
        if self._error is None and not self.completed:
            # A stopped run may be resumed. Its checkpoint holds the metrics as they are here, before after_train.
            self._state_at_end = self.storage.state_dict()
        self._call_each("after_train")
        self._call_each("before_write")
        self._call_each("on_write")
        if "on_save" in self._requests:
            self._at_last_save = self._error is None
            if self._at_last_save and self._ends_together:
                self._gather_state()
            self._call_each("on_save")
        self._call_each("after_run")
        self._requests.clear()
        self._running = self._ends_together = False
        if self._error is not before:
            raise self._error  # type: ignore[misc]

    def _call_each(self, event: str, *args: Any) -> None:
        """Call every hook that has ``event``, whatever the others raise."""
        for listener in self._listeners[event]:
            self._attempt(self._run, (listener,), event, args, {})

    def _attempt(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> BaseException:
        """Record an error. The first one goes to ``on_exception`` and is raised; later ones are added as notes.

        Returns:
            The error to raise: ``error``, or a RuntimeError in place of ``sys.exit(0)``.
        """
        if isinstance(error, SystemExit) and not error.code:
            error = as_failure(error, self.iter)
        if self._error is not None:
            if error is not self._error:
                logger.error("Another exception, after the one that ended training", exc_info=error)
                self._error.add_note(f"then also: {type(error).__name__}: {error}")
            return error
        self._error = error
        error.logged_by_trainer = True  # type: ignore[attr-defined]
        if isinstance(error, Exception):
            level = logging.DEBUG if isinstance(error, ConfigError) else logging.ERROR  # its message is enough
            logger.log(level, "Exception during training, at iteration %d", self.iter, exc_info=error)
        else:
            logger.warning("%s ended training at iteration %d", type(error).__name__, self.iter)
        self._call_each("on_exception", error)
        return error

    def _serve_requests(self) -> None:
        """Evaluate, write metrics, then save, so that the checkpoint has the state after all of them."""
        self._check_state(set(self._requests))
        for event in ("on_eval", "on_write", "on_save", "on_extra_save"):
            if event in self._requests:
                self.only_due = not self._requests.pop(event)
                if event.endswith("_save") and self.ranks_in_sync:
                    self._gather_state()
                if event == "on_write":
                    self._dispatch("before_write")
                self._dispatch(event)
        self.only_due = False

    def _check_state(self, requests: set[str]) -> None:
        """Raise an error if losses or weights must not be evaluated, written or saved (``requests``)."""

    def _gather_state(self) -> None:
        """Collect from all ranks what a checkpoint needs. Called on all ranks before a save."""

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint.

        ``iteration``: the last finished one; ``hooks``: their states; ``storage``: windows of metrics; ``end``: how the
        run ended, if this is its last checkpoint.
        """
        state: dict[str, Any] = {"iteration": self.finished_iter}
        if end := self._end():
            state["end"] = end
        if hooks := self._hooks_state():
            state["hooks"] = hooks
        if self._running:
            state["storage"] = self._state_at_end or self.storage.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state. :attr:`iter` becomes the last finished iteration, so training continues at ``iter + 1``.

        During training nothing is loaded, with a warning: a hook that loads a checkpoint gets the model's weights only.
        """
        if self._running:
            logger.warning(
                "A checkpoint was loaded during training: the model has its weights now. Iteration (%d), optimizer, "
                "hooks and data stay as they are; to load these too, load the checkpoint before train(). To end with "
                "the best weights, set CHECKPOINT.LOAD_BEST_AT_END",
                self.iter,
            )
            return
        self.iter = self._finished = state_dict["iteration"]
        self._has_state, self._stop, self._error, self._at_last_save = True, None, None, False
        self._trained = False
        self._loaded_end = state_dict.get("end")
        self._load_hooks_state(state_dict.get("hooks", {}))
        self._storage_state = state_dict.get("storage")
