"""The training loop: steps, the hooks around them, requests of hooks, and how a run ends.

The docstring of :class:`~hookline.hooks.HookBase` lists all events in order. Requests of hooks are served at the end of
the step, after ``after_step``, so the order of hooks does not matter. One rank may make a request; all ranks then serve
it at the end of the same step.

``storage.iter == trainer.iter`` during a step. In ``after_train`` both are the number of finished iterations, so a
final evaluation is logged one iteration after the last step. After an error both keep the iteration that failed.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Never, Self

from ..config import ConfigError
from ..config.rare_names import imported_when_used
from ..hooks.base import HookBase, StopTraining
from ..hooks.event_storage import EventStorage
from ..hooks.hook_list import HookCaller
from . import comm
from .ranks.agreement import Agreement, StopRequest, as_failure
from .step.own_loop import OpenStorage, OwnLoop

__all__ = ["HookBase", "TrainResult", "TrainerBase"]

# detectron2 has all trainers in this module
__getattr__ = imported_when_used(__name__, {"SimpleTrainer": ".simple_trainer", "AMPTrainer": ".compat.amp_trainer"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        reason: "completed", or the argument of ``request_stop``.
        iteration: number of finished iterations, including those before a resume.
        metrics: the last value of every metric.
        exit_code: for the program: 0, or that of ``request_stop`` if the run should be resumed (see docs/errors.md).
    """

    reason: str
    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)
    exit_code: int = 0


class TrainerBase(HookCaller):
    """Calls :meth:`run_step` repeatedly, and hooks around it. Does not know about models or data.

    Attributes:
        iter: the current iteration, from ``start_iter`` to ``max_iter - 1``; the number of finished iterations when
            the loop has ended.
        start_iter: the first iteration of this run.
        finished_iter: the last finished iteration.
        max_iter: the end of the run. If it is changed during training, hooks get ``set_max_iter(max_iter)``.
        epoch: the current pass over the data, from 0.
        iters_per_epoch: iterations in one pass, or None if unknown.
        epoch_ended: whether the current step is the last of its epoch.
        storage: the :class:`~hookline.hooks.EventStorage` of the run.
        comm: the module of rank and collective functions, for hooks.
        name: a name for ``@on(..., trainer="name")``, in addition to the names of the trainer's classes.
    """

    storage: Any = OpenStorage()
    epoch: int = 0
    iters_per_epoch: int | None = None
    epoch_ended: bool = False
    due_only: bool = False  # in on_write and on_save: only hooks whose period ends with this step act
    comm = comm

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        trainer = super().__new__(cls)
        TrainerBase.__init__(trainer)  # trainers of detectron2's projects may leave it out
        return trainer

    def __init__(self) -> None:
        super().__init__()
        self._max_iter: int = 0
        self._longest: int = 0  # the largest max_iter of the run
        self._has_state = False  # from an earlier train(), or loaded
        self._last_storage: EventStorage | None = None  # of the last train(), or loaded
        self._requests: dict[str, bool] = {}  # events, and whether all hooks act, not only those that are due
        self._begin_run(0)

    def _begin_run(self, start_iter: int, stop: StopRequest | None = None) -> None:
        """Set the state of a run in which nothing has happened yet."""
        self.iter: int = start_iter
        self.start_iter: int = start_iter
        self.finished_iter: int = start_iter - 1
        self._error: BaseException | None = None
        self._stop = stop
        self._agreement: Agreement | None = None  # with other ranks, during training
        self._in_loop = False  # the loop is that of _train()
        self._own_loop: OwnLoop | None = None  # the loop is the subclass's own
        self._at_last_save = False  # the checkpoint that is saved now is the final one
        self._state_at_end: Mapping[str, Any] | None = None  # of the storage, at the last step of a stopped run
        self._loaded_end: Mapping[str, Any] | None = None  # how the run in the loaded checkpoint ended
        self._requests.clear()
        self._began = time.monotonic()

    def __reduce_ex__(self, protocol: Any) -> Never:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: make a new one")

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
            RuntimeError: a step or a hook called ``sys.exit(0)``, which would look like a run that completed.
        """
        return self._train(start_iter, max_iter)

    def _train(self, start_iter: int, max_iter: int, stop: StopRequest | None = None) -> TrainResult:
        """Train; with ``stop``, only repeat the end of a run that was stopped before."""
        logger.info("Starting training from iteration %d", start_iter)
        storage = self._prepare(start_iter, max_iter, stop)
        self._in_loop = True
        with storage:
            try:
                try:
                    self.before_train()
                    run_step = self.run_step
                    while self.iter < self.max_iter and self._stop is None:
                        self._begin_step()
                        self.before_step()
                        run_step()
                        self._step_done()
                        try:
                            self.after_step()
                        except StopTraining as stop_training:  # by a method of a subclass: in a hook it is a request
                            self.request_stop(str(stop_training))
                        self._end_step()
                        self.iter += 1
                except StopTraining as stop_training:
                    if self._agreement is not None:  # all ranks must give up the same step
                        self._agreement.wait_for_stop(self.iter, str(stop_training))
                    self.request_stop(str(stop_training))
            except BaseException as error:
                self._requests.clear()
                self._fail(error)
            try:
                self._end_run()
            finally:
                self._in_loop = False
            if self._error is not None:
                raise self._error
            metrics = {name: value for name, (value, _) in storage.latest().items()}
        end = self._stop
        if end is None or (end.exit_code and self.completed):  # interrupted after the last step
            end = StopRequest("completed")
        logger.info("Training ended at iteration %d: %s", self.iter, end.reason)
        return TrainResult(end.reason, self.iter, metrics, end.exit_code)

    def _prepare(self, start_iter: int, max_iter: int, stop: StopRequest | None) -> EventStorage:
        """Set the state of a new run, and return its storage. ``stop``: see :meth:`_train`."""
        if self._running:
            raise RuntimeError("train() was called while this trainer trains, such as by its own hook")
        starts_over = self._has_state and start_iter != self.finished_iter + 1
        storage = EventStorage(start_iter)
        if not starts_over and self._last_storage is not None:
            storage.load_state_dict(self._last_storage.state_dict())
        self.storage = self._last_storage = storage
        self._has_state = True
        self._begin_run(start_iter, stop)
        self.max_iter = self._longest = max_iter
        if starts_over:
            for hook in self._hooks:
                hook.reset_state()
        self._start_hooks()
        if comm.get_world_size() > 1:
            self._agreement = Agreement(self)
        logger.debug("Hooks, in the order they are called in:\n%s", self.describe_hooks())
        return storage

    # The loop above calls these four methods, and so may a subclass's own loop: then they do the loop's work, too.

    def before_train(self) -> None:
        if not self._in_loop:
            OwnLoop.of(self)
        # Hooks that a subclass's before_train() has registered had the event then.
        uncalled = [hook for _, cost, hook in self._listeners["before_train"] if not cost[1]]
        self._call_hooks("before_train", hooks=uncalled)

    def before_step(self) -> None:
        if not self._in_loop:
            OwnLoop.of(self).begin_step()
        if self._listeners["before_step"]:
            self._call_hooks("before_step")

    def after_step(self) -> None:
        if not self._in_loop:
            OwnLoop.of(self).finish_step()
        if self._listeners["after_step"]:
            self._call_hooks("after_step")
        if not self._in_loop:
            self._end_step()

    def after_train(self) -> None:
        """Call ``after_train`` of all hooks, write metrics, and save if one asks. A subclass may do more afterwards."""
        if self._own_loop is not None and not self._own_loop.ending:
            self._own_loop.end()
            return
        if not self._running:  # the loop has not begun, or has ended
            return
        before = self._error
        self._call_all("after_train")
        self._write_and_save()
        if self._error is not before:
            raise self._error  # type: ignore[misc]

    def before_epoch(self) -> None:  # called by trainers that have epochs: SimpleTrainer._begin_step
        self.emit("before_epoch")

    def _begin_step(self) -> None:
        """Do what a step begins with, before the hooks' ``before_step``."""
        self.storage.iter = self.iter

    def run_step(self) -> None:
        """Run one iteration. Subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} must define run_step()")

    def after_backward(self) -> None:
        if self._listeners["after_backward"]:
            self.emit("after_backward")

    def _step_done(self) -> None:
        """Count the step, before the hooks' ``after_step``."""
        self._notice_stop()
        self.finished_iter = self.iter
        if self.iter == self.start_iter:
            self._first_step_done()

    def _end_step(self) -> None:
        """End the epoch if this step does, and do what hooks have requested."""
        self._notice_stop()
        if self.epoch_ended:
            try:
                self.after_epoch()
            except StopTraining as stop_training:
                self.request_stop(str(stop_training))
        if self._agreement is not None:
            self._agreement.end_step(self)
        if self._requests:
            self._serve_requests()

    def _notice_stop(self) -> None:
        """Take ``trainer.iter = trainer.max_iter``, by which hooks of detectron2 stop training, as a request."""
        if self.iter >= self.max_iter and self._in_loop and self.iter != self.storage.iter:
            self.iter = self.storage.iter
            self.request_stop("trainer.iter was set to max_iter")

    def after_epoch(self) -> None:
        self.emit("after_epoch")

    def _serve_requests(self) -> None:
        """Evaluate, write metrics, then save, so that the checkpoint has the state after all of them."""
        self._check_state(set(self._requests))
        for event in ("on_eval", "on_write", "on_save"):
            if event in self._requests:
                self.due_only = not self._requests.pop(event)
                if event == "on_save" and self.ranks_in_sync:
                    self._gather_state()
                if event == "on_write":
                    self.emit("before_write")
                self.emit(event)
        self.due_only = False

    def _check_state(self, requests: set[str]) -> None:
        """Raise an error if losses or weights must not be evaluated, written or saved (``requests``)."""

    def _gather_state(self) -> None:
        """Collect from all ranks what a checkpoint needs. Called on all ranks before a save."""

    # ------------------------------------------------------------------ the end of a run

    def _end_run(self) -> None:
        """End the run: call the events after the loop. If hooks raise errors, the others are still called."""
        if self._error is None:
            if self._stop is None and self.iter >= self.max_iter > self.finished_iter + 1:
                self._stop = StopRequest("trainer.iter was set to max_iter")
            self.iter = self.storage.iter = self.finished_iter + 1
            self._attempt(self._check_state, {"on_eval", "on_save"})
        self.due_only = False  # an error may have ended a step
        if self._agreement is not None:
            self._attempt(self._agreement.end, self)
        if self._error is None and not self.completed:
            # A stopped run may be resumed. Its checkpoint holds the metrics as they are here, before after_train.
            self._state_at_end = self.storage.state_dict()
        try:
            if self._own_loop is None:
                self.after_train()
            else:  # the loop is in it already
                TrainerBase.after_train(self)
        except BaseException as error:
            if not self._running:  # what a subclass does after the end of the run
                raise
            self._fail(error)
        if self._running:  # it did not call its parent's
            self._write_and_save()

    def _write_and_save(self) -> None:
        """Write the last metrics and save."""
        self._call_all("before_write")
        self._call_all("on_write")
        if "on_save" in self._requests:  # by after_train of PeriodicCheckpointer
            self._at_last_save = self._error is None
            if self._at_last_save and self.ranks_in_sync:
                self._attempt(self._gather_state)
            self._call_all("on_save")
        self._call_all("after_run")
        self._requests.clear()
        self._running, self._agreement = False, None

    def _call_all(self, event: str, *args: Any) -> None:
        """Call every hook that has ``event``, whatever the others raise."""
        self._call_hooks(event, args, on_error=self._fail)

    def _attempt(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Record an error. The first one goes to ``on_exception`` and is raised; later ones are added as notes."""
        if isinstance(error, SystemExit) and not error.code:
            error = as_failure(error, self.iter)
        if error is self._error:
            return
        if self._error is not None:
            logger.error("Another exception, after the one that ended training", exc_info=error)
            self._error.add_note(f"then also: {type(error).__name__}: {error}")
            return
        self._error = error
        if isinstance(error, ConfigError) and self.finished_iter >= self.start_iter:
            error.exit_code = 1
        error.logged_by_trainer = True  # type: ignore[attr-defined]
        if isinstance(error, Exception):
            level = logging.DEBUG if isinstance(error, ConfigError) else logging.ERROR  # its message is enough
            logger.log(level, "Exception during training, at iteration %d", self.iter, exc_info=error)
        else:
            logger.warning("%s ended training at iteration %d", type(error).__name__, self.iter)
        self._call_all("on_exception", error)

    # ------------------------------------------------------------------ how far the run is

    @property
    def max_iter(self) -> int:
        return self._max_iter

    @max_iter.setter
    def max_iter(self, value: int) -> None:
        if not isinstance(value, Real) or isinstance(value, bool) or value < 0 or (value != math.inf and value % 1):
            raise ConfigError(
                f"max_iter: expected a number of iterations, not {value!r}; for 20 epochs: 20 * trainer.iters_per_epoch"
            )
        changed, self._max_iter = value != self._max_iter, value
        if changed and self._running:
            self._longest = max(self._longest, value)
            self._length_changed()

    def _length_changed(self) -> None:
        self.emit("set_max_iter", self.max_iter)

    @property
    def completed(self) -> bool:
        """Whether all iterations up to ``max_iter`` are done without an error."""
        return self._error is None and self.iter >= self.max_iter

    @property
    def interrupted(self) -> bool:
        """Whether the run ends early because of an exit code (a signal, a time limit). It can be resumed."""
        asked = self._stop is not None and self._stop.exit_code != 0
        return asked and not self.failed and self.finished_iter + 1 < self.max_iter

    @property
    def stopped(self) -> bool:
        """Whether the run ends early on purpose, for example by early stopping. A resume does not continue it."""
        return self._error is None and self._stop is not None and not self._stop.exit_code

    @property
    def stop_reason(self) -> str:
        """Why the run stops early: the argument of ``request_stop`` or ``StopTraining``. Empty if it does not."""
        return "" if self._stop is None else self._stop.reason

    @property
    def failed(self) -> bool:
        """Whether the run ends with an error."""
        return self._error is not None

    def _end(self) -> dict[str, Any] | None:
        """Return how the run ended; None if it has not, was interrupted or failed.

        ``complete`` is True if the work after the loop, such as the last evaluation, is done too.
        """
        done = self.finished_iter + 1
        if not self.stopped and (self._error is not None or not done >= self.max_iter > 0):
            return None
        reason = self.stop_reason if self.stopped else "completed"
        return {"reason": reason, "iteration": done, "max_iter": self._longest, "complete": self._at_last_save}

    # ------------------------------------------------------------------ requests

    def replay_command(self, iteration: int) -> str:
        """Return the shell command that repeats a step, for messages; empty if there is none."""
        return ""

    def request_stop(self, reason: str = "", exit_code: int = 0, everywhere: bool = False) -> None:
        """Stop training after the current step. The first request counts, but an interruption yields to a stop.

        With several ranks, one rank may request it: all ranks stop at the end of the same step, within about a second.

        Args:
            reason: returned by :meth:`train`, and logged.
            exit_code: not 0 if the run is interrupted and should be resumed (a signal, a time limit). Its checkpoint
                is named by the iteration instead of ``model_final``, and the program exits with this code.
            everywhere: all ranks make this request in this step, so no exchange between ranks is needed.
        """
        request = StopRequest(reason or "stop requested", exit_code)
        if self._agreement is None or not self._agreement.takes(request, everywhere):
            self._stop = request.instead_of(self._stop)

    def request_save(self, everywhere: bool = False, due: bool = False) -> None:
        """Save a checkpoint at the end of the current step. ``everywhere``: as for :meth:`request_stop`.

        Args:
            due: only the checkpointers whose period ends with this step save, unless there is another request.
        """
        self._request("on_save", everywhere, due)

    def request_write(self, everywhere: bool = False, due: bool = False) -> None:
        """Write metrics at the end of the current step. ``everywhere``, ``due``: as for :meth:`request_save`."""
        self._request("on_write", everywhere, due)

    def request_eval(self, everywhere: bool = False) -> None:
        """Evaluate at the end of the current step. ``everywhere``: as for :meth:`request_stop`."""
        self._request("on_eval", everywhere)

    def _request(self, event: str, everywhere: bool, due: bool = False) -> None:
        if self._agreement is None or not self._agreement.takes(event, everywhere):
            self._requests[event] = self._requests.get(event, False) or not due

    def clock(self) -> float:
        """Seconds since training began. With several ranks: rank 0's value at the last exchange, the same on all."""
        return time.monotonic() - self._began if self._agreement is None else self._agreement.clock

    @property
    def ranks_in_sync(self) -> bool:
        """Whether there are several ranks with the same hooks. Hooks may then call collectives in their events."""
        return self._agreement is not None and self._agreement.same_hooks

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint.

        ``iteration``: the last finished one; ``hooks``: their states, the schedule's too; ``storage``: windows of
        metrics; ``end``: how the run ended, if this is its last checkpoint.
        """
        hooks = self._hook_states() or None
        state: dict[str, Any] = {"iteration": self.finished_iter, "end": self._end(), "hooks": hooks}
        if self._running:
            state["storage"] = self._state_at_end or self.storage.state_dict()
        return {name: value for name, value in state.items() if value is not None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state. :attr:`iter` becomes the last finished iteration, so training continues at ``iter + 1``.

        During training nothing is loaded, with a warning: a hook that loads a checkpoint gets the model's weights only.
        """
        if self._running:
            logger.warning(
                "A checkpoint was loaded during training: the model has its weights now. Iteration (%d), optimizer, "
                "hooks and data stay as they are. Load it before train(), or set CHECKPOINT.LOAD_BEST_AT_END",
                self.iter,
            )
            return
        self.iter = self.finished_iter = state_dict["iteration"]
        self._has_state, self._stop, self._error, self._at_last_save = True, None, None, False
        self._loaded_end = state_dict.get("end")
        self._load_hook_states(state_dict.get("hooks", {}))
        vars(self).pop("storage", None)
        self._last_storage = None
        if "storage" in state_dict:
            self.storage = self._last_storage = EventStorage(self.finished_iter + 1)
            self.storage.load_state_dict(state_dict["storage"])
