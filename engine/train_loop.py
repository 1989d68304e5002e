"""The training loop: steps, the hooks around them, requests of hooks, and how a run ends.

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
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, cast

from ..config import ConfigError
from ..config.rare_names import imported_when_used
from ..hooks.base import HookBase, StopTraining
from ..hooks.event_storage import EventStorage, get_event_storage
from ..hooks.hook_list import HookList, hook_name
from . import comm
from .ranks.agreement import Agreement, RankHooks, StopRequest, as_failure, share_metrics
from .step.own_loop import OwnLoop

__all__ = ["OPEN_STORAGE", "HookBase", "TrainResult", "TrainerBase"]

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
        exit_code: exit code for the program: 0, or that of ``request_stop`` if the run was interrupted and should be
            resumed (see docs/errors.md).
    """

    reason: str
    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)
    exit_code: int = 0


class _OpenStorage:
    """Stands for the open storage, in a trainer whose steps another trainer calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(get_event_storage(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(get_event_storage(), name, value)


OPEN_STORAGE: EventStorage = cast(Any, _OpenStorage())
"""The storage of a trainer outside of its ``train()``."""


class TrainerBase:
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
        name: a name for ``@on(..., trainer="name")``, in addition to the names of the trainer's classes.
    """

    name: str = ""
    storage: EventStorage = OPEN_STORAGE
    epoch: int = 0
    iters_per_epoch: int | None = None
    epoch_ended: bool = False
    only_due: bool = False
    comm = comm

    def __init__(self) -> None:
        self._hook_list = HookList(self)
        self._listeners = self._hook_list.listeners  # before an event, a step looks whether any hook has it
        self.iter: int = 0
        self.start_iter: int = 0
        self._max_iter: int = 0
        self._longest: int = 0  # the largest max_iter of the run
        self._finished: int = -1  # the last finished iteration
        self._error: BaseException | None = None
        self._stop: StopRequest | None = None
        self._requests: dict[str, bool] = {}  # events, and whether all hooks act, not only those that are due
        self._agreement: Agreement | None = None  # with other ranks, during training
        self._at_last_save = False  # the checkpoint that is saved now is the final one
        self._saved_end = False  # the work after ``after_train`` of all hooks is done
        self._ends_together = False  # all ranks end the run, with the same hooks
        self._in_loop = False  # the loop is that of _train()
        self._in_step = False  # the step is counted, and not ended
        self._error_in_loop: BaseException | None = None
        self._own_loop: OwnLoop | None = None  # the loop is the subclass's own
        self._began = 0.0
        self._has_state = False  # from an earlier train(), or loaded
        self._trained = False  # the state is that of an earlier train()
        self._storage_state: Mapping[str, Any] | None = None  # loaded; used by the next train()
        self._state_at_end: Mapping[str, Any] | None = None  # of the storage, at the last step of a stopped run
        self._loaded_end: Mapping[str, Any] | None = None  # how the run in the loaded checkpoint ended

    # ------------------------------------------------------------------ hooks

    @property
    def _hooks(self) -> list[HookBase]:
        return self._hook_list.hooks

    @_hooks.setter
    def _hooks(self, hooks: list[HookBase]) -> None:
        self._hook_list.hooks = hooks

    @property
    def _running(self) -> bool:
        return self._hook_list.running

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        """Add hooks. At each event hooks are called in the order of registration.

        While training, new hooks get ``before_train`` before the next step, and take part from then on.

        Args:
            hooks: the hooks. None is skipped.

        Raises:
            TypeError: one is not a HookBase.
            HookOrderError: the order violates a hook's ``after`` or ``before``; the message shows a valid order.
        """
        self._hook_list.register(hooks)

    def remove_hook(self, hook: HookBase | type[HookBase]) -> list[HookBase]:
        """Remove hooks.

        While training, the hooks get ``after_train`` and ``after_run`` before the next step. A hook that was registered
        in the same step gets no event.

        Args:
            hook: a hook; or a class, to remove all its hooks.

        Returns:
            The removed hooks.
        """
        return self._hook_list.remove(hook)

    def find_hook(self, cls: type | str) -> Any:
        """Return the first hook of a class, given as a class or by name; None if there is none."""
        return next(iter(self.find_hooks(cls)), None)

    def find_hooks(self, cls: type | str) -> list[Any]:
        """Return all hooks of a class, given as a class or by name."""
        return self._hook_list.find(cls)

    def describe_hooks(self) -> str:
        """Return a text with the hooks in their order, and the events that each overrides."""
        return self._hook_list.describe()

    def hook_costs(self) -> dict[str, tuple[float, int]]:
        """Return the seconds and the number of calls of each hook in the current or last run, most expensive first."""
        return self._hook_list.costs()

    def listens(self, event: str) -> bool:
        """Return whether any hook has the method ``event``, so that its arguments need not be computed if not."""
        return bool(self._hook_list.listeners_of(event))

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the method ``event`` of every hook that has it. The event need not be declared.

        Example: ``trainer.emit("verify_batch", batch)``
        """
        self._hook_list.call(event, args, kwargs)

    def _hooks_changed(self) -> None:
        """Called when the table of the hooks' methods was built."""

    def _names(self) -> set[str]:
        """Return the names that functions may be decorated for."""
        return {self.name, *(cls.__name__ for cls in type(self).__mro__)}

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
        self._trained = self._in_loop = True
        with self.storage:
            try:
                try:
                    self.before_train()
                    run_step = self.run_step
                    while self.iter < self.max_iter and self._stop is None:
                        self._begin_step()
                        self.before_step()
                        run_step()
                        self._finish_step()
                        try:
                            self.after_step()
                        except StopTraining as stop_training:  # by the method of a subclass; in a hook it is a request
                            self.request_stop(str(stop_training))
                        if self._in_step:
                            self._end_step()
                        self.iter += 1
                except StopTraining as stop_training:
                    self._stop_step(str(stop_training))
            except BaseException as error:
                self._requests.clear()
                failure = self._fail(error)
                if failure is error:
                    raise
                raise failure from error
            finally:
                try:
                    self._end_run(self.after_train)
                finally:
                    self._in_loop = False
            metrics = {name: value for name, (value, _) in self.storage.latest().items()}
        end = self._stop
        if end is None or (end.exit_code and self.completed):  # interrupted after the last step
            end = StopRequest("completed")
        logger.info("Training ended at iteration %d: %s", self.iter, end.reason)
        return TrainResult(end.reason, self.iter, metrics, end.exit_code)

    def _prepare(self, start_iter: int, max_iter: int, stop: StopRequest | None) -> None:
        """Set the state of a new run. ``stop``: see :meth:`_train`."""
        if not self._hook_list.is_of(self):
            raise ConfigError(
                f"this {type(self).__name__} is a shallow copy, and its hooks act on the trainer that was copied: make "
                "a new trainer"
            )
        starts_over = self._has_state and start_iter != self._finished + 1
        self._has_state = True
        self.iter = self.start_iter = start_iter
        self.max_iter = self._longest = max_iter
        self._finished = start_iter - 1
        self._error, self._loaded_end, self._state_at_end, self._at_last_save = None, None, None, False
        self._stop, self._agreement = stop, None
        self._requests.clear()
        OwnLoop.leave(self)  # that of an earlier run, which ended without its after_train()
        self._began = time.monotonic()
        if starts_over:
            for hook in self._hooks:
                hook.reset_state()
            self._storage_state = None
        elif self._storage_state is None and self._trained:
            self._storage_state = self.storage.state_dict()
        self._hook_list.start(self._names())
        if comm.get_world_size() > 1:
            self._agreement = Agreement(self.start_iter, self._rank_hooks())
        logger.debug("Hooks, in the order they are called in:\n%s", self.describe_hooks())

    def _use_storage(self, storage: EventStorage) -> None:
        """Put metrics into ``storage``, which continues that of a resumed run."""
        self.storage = storage
        if self._storage_state is not None:
            storage.load_state_dict(self._storage_state)
            self._storage_state = None

    # The loop above calls these four methods, and so may a subclass's own loop: then they do the loop's work, too.

    def before_train(self) -> None:
        if not self._in_loop:
            OwnLoop.of(self)
        self.emit("before_train")

    def before_step(self) -> None:
        if not self._in_loop:
            OwnLoop.of(self).begin_step()
        if self._listeners["before_step"]:
            self._hook_list.call("before_step")

    def after_step(self) -> None:
        if not self._in_loop:
            OwnLoop.of(self).finish_step()
        if self._listeners["after_step"]:
            self._hook_list.call("after_step")
        if self._in_loop:
            self._end_step()
        else:
            OwnLoop.of(self).end_step()

    def after_train(self) -> None:
        """Call ``after_train`` of all hooks, write the last metrics, and save. A subclass may do more afterwards."""
        if not self._in_loop:
            OwnLoop.of(self).end(lambda: TrainerBase.after_train(self))
            return
        self._call_all("after_train")
        self._write_and_save()
        if self._error is not None and self._error is not self._error_in_loop:
            raise self._error

    def _in_output_dir(self) -> AbstractContextManager[None]:
        """Return the context of a run on the disk."""
        return nullcontext()

    def before_epoch(self) -> None:  # called by trainers that have epochs: SimpleTrainer._begin_step
        self.emit("before_epoch")

    def _begin_step(self) -> None:
        """Do what a step begins with, before the hooks' ``before_step``."""
        self.storage.iter = self.iter
        if self._hook_list.waits:
            self._hook_list.change()

    def run_step(self) -> None:
        """Run one iteration. Subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} must define run_step()")

    def after_backward(self) -> None:
        if self._listeners["after_backward"]:
            self.emit("after_backward")

    def _finish_step(self) -> None:
        """Count the step, before the hooks' ``after_step``."""
        self._finished, self._in_step = self.iter, True
        if self.iter == self.start_iter:
            self._first_step_done()

    def _end_step(self) -> None:
        """End the epoch if this step does, and do what hooks have requested. Called once in each step."""
        self._in_step = False
        if self.epoch_ended:
            try:
                self.after_epoch()
            except StopTraining as stop:
                self.request_stop(str(stop))
        if self._agreement is not None:
            self._exchange_requests()
        if self._requests:
            self._serve_requests()

    def _first_step_done(self) -> None:
        """Called after the first step."""
        self._hook_list.check_called()

    def after_epoch(self) -> None:
        self.emit("after_epoch")

    def _serve_requests(self) -> None:
        """Evaluate, write metrics, then save, so that the checkpoint has the state after all of them."""
        self._check_state(set(self._requests))
        for event in ("on_eval", "on_write", "on_save", "on_extra_save"):
            if event in self._requests:
                self.only_due = not self._requests.pop(event)
                if event.endswith("_save") and self.ranks_in_sync:
                    self._gather_state()
                if event == "on_write":
                    self.emit("before_write")
                self.emit(event)
        self.only_due = False

    def _check_state(self, requests: set[str]) -> None:
        """Raise an error if losses or weights must not be evaluated, written or saved (``requests``)."""

    def _gather_state(self) -> None:
        """Collect from all ranks what a checkpoint needs. Called on all ranks before a save."""

    # ------------------------------------------------------------------ the end of a run

    def _end_run(self, after_train: Callable[[], None]) -> None:
        """End the run: call the events after the loop. If hooks raise errors, the others are still called."""
        self._saved_end, before, late = False, self._error, None
        self._error_in_loop = before
        if before is None:
            self.iter = self.storage.iter = self._finished + 1
            self._attempt(self._check_state, {"on_eval", "on_save"})
        self._attempt(self._end_requests)
        if self._error is None and not self.completed:
            # A stopped run may be resumed. Its checkpoint holds the metrics as they are here, before after_train.
            self._state_at_end = self.storage.state_dict()
        try:
            after_train()
        except BaseException as error:
            if self._saved_end and self._error is None:  # what a subclass does after the end of the run
                late = error
            else:
                self._fail(error)
        self._write_and_save()
        self._requests.clear()
        self._hook_list.running = self._ends_together = False
        if self._error is not before:
            raise self._error  # type: ignore[misc]
        if late is not None:
            raise late

    def _write_and_save(self) -> None:
        """Write the last metrics and save, once: in ``after_train``, or after one that does not call its parent's."""
        if self._saved_end:
            return
        self._saved_end = True
        self._call_all("before_write")
        self._call_all("on_write")
        if "on_save" in self._requests:
            self._at_last_save = self._error is None
            if self._at_last_save and self._ends_together:
                self._attempt(self._gather_state)
            self._call_all("on_save")
        self._call_all("after_run")

    def _call_all(self, event: str, *args: Any) -> None:
        """Call every hook that has ``event``, whatever the others raise."""
        self._hook_list.call(event, args, on_error=self._fail)

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
        self._call_all("on_exception", error)
        return error

    # ------------------------------------------------------------------ how far the run is

    @property
    def max_iter(self) -> int:
        return self._max_iter

    @max_iter.setter
    def max_iter(self, value: int) -> None:
        if (
            isinstance(value, bool)
            or not isinstance(value, Real)
            or not (value >= 0 and value in (math.inf, value // 1))
        ):
            raise ConfigError(
                f"max_iter: expected a number of iterations, not {value!r}; for 20 epochs: 20 * trainer.iters_per_epoch"
            )
        changed, self._max_iter = value != self._max_iter, value
        if changed and self._running:
            self._longest = max(self._longest, value)
            self._length_changed()

    def _length_changed(self) -> None:
        """Called when ``max_iter`` changes during training."""
        self.emit("set_max_iter", self.max_iter)

    @property
    def finished_iter(self) -> int:
        """The last finished iteration. A checkpoint has the state after it; a resume starts with the next one."""
        return self._finished

    @property
    def completed(self) -> bool:
        """Whether all iterations up to ``max_iter`` are done without an error."""
        return self._error is None and self.iter >= self.max_iter

    @property
    def interrupted(self) -> bool:
        """Whether the run ends early because of an exit code (a signal, a time limit). It can be resumed."""
        stop = self._stop
        return self._error is None and stop is not None and bool(stop.exit_code) and self._finished + 1 < self.max_iter

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

        Returns:
            ``reason``: "completed", or the argument of ``request_stop``; ``iteration``: number of finished iterations;
            ``max_iter``: the largest of the run; ``complete``: True if the work after the loop, such as the last
            evaluation, is done too. The final checkpoint has True.
        """
        done = self._finished + 1
        if self.stopped:
            assert self._stop is not None
            reason = self._stop.reason
        elif self._error is None and done >= self.max_iter > 0:
            reason = "completed"
        else:
            return None
        complete = self._at_last_save
        return {"reason": reason, "iteration": done, "max_iter": self._longest, "complete": complete}

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
        if self._agreement is not None and self._agreement.needs_exchange("stop", everywhere):
            self._agreement.ask(request)
        else:
            self._stop_with(request)

    def request_save(self, everywhere: bool = False, extra: bool = False, due: bool = False) -> None:
        """Save a checkpoint at the end of the current step. ``everywhere``: as for :meth:`request_stop`.

        Args:
            extra: by :class:`~hookline.hooks.RollingCheckpointer`, not by
                :class:`~hookline.hooks.PeriodicCheckpointer`. All ranks must request it.
            due: only the checkpointers whose period ends with this step save, unless there is another request.
        """
        if extra:
            self._requests["on_extra_save"] = True
        else:
            self._request("on_save", everywhere, due)

    def request_write(self, everywhere: bool = False, due: bool = False) -> None:
        """Write metrics at the end of the current step. ``everywhere``, ``due``: as for :meth:`request_save`."""
        self._request("on_write", everywhere, due)

    def request_eval(self, everywhere: bool = False) -> None:
        """Evaluate at the end of the current step. ``everywhere``: as for :meth:`request_stop`."""
        self._request("on_eval", everywhere)

    def _request(self, event: str, everywhere: bool, due: bool = False) -> None:
        if self._agreement is not None and self._agreement.needs_exchange(event, everywhere):
            self._agreement.ask(event)
        else:
            self._requests[event] = self._requests.get(event, False) or not due

    def _stop_with(self, request: StopRequest) -> None:
        if request.outranks(self._stop):
            self._stop = request

    def _stop_step(self, reason: str) -> None:
        """Stop because a step raised ``StopTraining``. All ranks must do so in the same step."""
        reason = reason or "stop requested"
        if self._agreement is not None:
            self._agreement.wait_for_stop(self.iter, reason)
        self._stop_with(StopRequest(reason))

    def clock(self) -> float:
        """Seconds since training began. With several ranks: rank 0's value at the last exchange, the same on all."""
        return time.monotonic() - self._began if self._agreement is None else self._agreement.clock

    @property
    def ranks_in_sync(self) -> bool:
        """Whether there are several ranks with the same hooks. Hooks may then call collectives in their events."""
        return self._ends_together or (self._agreement is not None and self._agreement.same_hooks)

    def _exchange_requests(self) -> None:
        """Exchange requests with the other ranks if it is time; average metrics before they are written or saved."""
        agreement = self._agreement
        if agreement is None or not (self.iter >= agreement.next_iter or (self._requests and agreement.same_hooks)):
            return
        events, stop = agreement.exchange(self.iter, self._rank_hooks(), self._settings())
        self._requests |= dict.fromkeys(events, True)
        if stop is not None:
            self._stop_with(stop)
        if self._requests and agreement.same_hooks:
            share_metrics(self.storage, self._finished)

    def _settings(self) -> dict[str, Any]:
        """Return what must be the same on all ranks in each step, by name."""
        return {}

    def _end_requests(self) -> None:
        """After the loop: average the last metrics over ranks. A rank that failed leaves the others."""
        agreement, self._agreement = self._agreement, None
        self._ends_together = self.only_due = False  # only_due: an error may have ended a step
        if agreement is not None and agreement.same_hooks and not self.failed:
            share_metrics(self.storage, self._finished)
            self._ends_together = True

    def _rank_hooks(self) -> RankHooks:
        return RankHooks(tuple(map(hook_name, self._hooks)), self._hook_list.changes)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint.

        ``iteration``: the last finished one; ``hooks``: their states; ``storage``: windows of metrics; ``end``: how the
        run ended, if this is its last checkpoint.
        """
        state: dict[str, Any] = {"iteration": self.finished_iter}
        if end := self._end():
            state["end"] = end
        if hooks := self._hook_list.state_dict():
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
        self._hook_list.load_state_dict(state_dict.get("hooks", {}), self._names())
        self._storage_state = state_dict.get("storage")
