"""The training loop: steps, the hooks around them, what hooks ask for, and how a run ends.

The docstring of :class:`~hookline.hooks.HookBase` lists all events in order. ``before_train``, ``before_step``,
``after_step`` and ``after_train`` do the loop's work, so a loop that calls them is a whole run.

``storage.iter == trainer.iter`` during a step. In ``after_train`` both are the number of finished iterations, so a
final evaluation is logged one iteration after the last step. After an error both keep the iteration that failed.
"""

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Never, Self

from ..config import ConfigError
from ..hooks.base import HookBase, StopTraining  # noqa: F401 (detectron2 has HookBase in this module)
from ..hooks.common import CurrentStorage
from ..hooks.event_storage import EventStorage, get_event_storage
from ..hooks.functions import on_event
from ..hooks.hook_list import HookList, WithHooks
from . import comm
from .parallel.rank_sync import RankSync
from .run_end import StopRequest, TrainResult, as_failure, log_error, not_called
from .setup.logger import setup_logger

logger = logging.getLogger(__name__)

Request = Literal["eval", "write", "save"]
# The phases at the end of a step, and what may be requested of them.
_PHASES: tuple[tuple[Request, str], ...] = (("eval", "on_eval"), ("write", "on_write"), ("save", "on_save"))
_RUNNING = "the trainer is training: train() was called by its own hook, or its loop did not call after_train()"


@dataclass
class LoopState:
    """What the loop keeps of one ``train()``, until the next one begins."""

    storage: EventStorage | None = None  # the metrics, with which the next train() continues; None in a new run
    sync: RankSync | None = None  # exchanges requests with other ranks; None outside of training, and with one rank
    began: float = field(default_factory=time.monotonic)
    in_step: bool = False  # whether before_step was called, and after_step not yet
    begins_epoch: bool = True  # whether the next step is the first one of its epoch, or of this train()
    prepared: dict[Request, int] = field(default_factory=dict)  # the iteration of the last prepare_for
    other_errors: list[BaseException | None] = field(default_factory=list)  # exceptions that are no error of the run
    storage_at_end: Mapping[str, Any] | None = None  # the storage's state when the loop of a stopped run ended
    of_ranks: tuple[int, Mapping[str, Any]] = (-1, {})  # an iteration, and what its checkpoint holds of each rank


class TrainerBase(WithHooks):
    """Calls :meth:`run_step` repeatedly, and hooks around it. Does not know about models or data.

    A subclass may have a loop of its own, which calls the same methods as :meth:`train` in an open
    :class:`~hookline.hooks.EventStorage`.

    Attributes:
        iter: the current iteration; the number of finished ones when the loop has ended.
        start_iter, finished_iter: the first iteration of this run, and the last finished one.
        max_iter: the end of the run. If it is changed during training, hooks get ``set_max_iter(max_iter)``.
        step_start: when ``before_step`` of the hooks was called, as ``time.perf_counter()``.
        epoch: the current pass over the data, from 0.
        iters_per_epoch: iterations in one pass, or None if unknown.
        epoch_ended: whether the current step is the last of its epoch.
        storage: the metrics of the run; before the first ``train()``, those of a run that calls this trainer's step.
        requests: what is asked for at the end of this step, on all ranks: "eval", "write", "save".
        ending: whether the loop has ended: ``after_train``, the last metrics and the last checkpoint follow.
        run_complete: whether all is done, with the last evaluation and checkpoint, here or in the loaded checkpoint.
        comm: the module of ranks, for hooks.
    """

    storage: EventStorage = CurrentStorage()  # type: ignore[assignment]
    epoch: int = 0
    iters_per_epoch: int | None = None
    epoch_ended: bool = False
    comm = comm
    on = on_event
    step_start: float = 0.0

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        trainer = super().__new__(cls)
        TrainerBase.__init__(trainer)  # trainers of detectron2's projects may leave it out
        return trainer

    def __init__(self) -> None:
        self.hooks = HookList(self)
        self.requests: set[Request] = set()
        self.iter: int = 0
        self._max_iter: int = 0
        self._loop = LoopState()
        self._reset(0)

    def _reset(self, start_iter: int) -> None:
        """Set the state of a run in which nothing has happened yet."""
        self.start_iter: int = start_iter
        self.finished_iter: int = start_iter - 1
        self.ending = self.run_complete = False
        self._error: BaseException | None = None
        self._stop: StopRequest | None = None
        self.requests.clear()

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: make a new one")

    # ------------------------------------------------------------------ the loop

    def train(self, start_iter: int, max_iter: int) -> TrainResult:
        """Run iterations ``start_iter`` to ``max_iter - 1``. May be called repeatedly.

        If ``start_iter`` follows the last finished iteration, hooks continue; otherwise their state is reset
        (:meth:`HookBase.reset_state`). Weights and optimizer are used as they are.

        Raises:
            Exception: the first error of a step or a hook, after ``after_train`` of all hooks.
            RuntimeError: a step or a hook called ``sys.exit(0)``, which would look like a run that completed.
        """
        if self.hooks.running:
            raise RuntimeError(_RUNNING)
        self.iter = self.start_iter = start_iter
        self.max_iter = max_iter
        with EventStorage(start_iter) as self.storage:
            try:
                self.before_train()
                while self.iter < self.max_iter and self._stop is None:
                    self.before_step()
                    self.run_step()
                    self.after_step()
                    self.iter += 1
            except StopTraining as stop:
                self._leave_step(stop)
            finally:
                self.after_train()
        if self.hooks.running:
            raise not_called(type(self).__name__, "after_train")
        end = None if self.completed and not self.stopped else self._stop  # no interruption after the last step
        result = TrainResult.of(end, self.iter, self.storage)
        logger.info("Training ended at iteration %d: %s", self.iter, result.reason)
        return result

    def before_train(self) -> None:
        """Begin the run, and call ``before_train`` of all hooks."""
        if self.hooks.running:
            raise RuntimeError(_RUNNING)
        self._begin()
        self.hooks.call("before_train")

    def before_step(self) -> None:
        """Begin a step, and call ``before_step`` of all hooks."""
        if not self.hooks.running:  # a loop of its own, without before_train()
            TrainerBase.before_train(self)
        loop, cls = self._loop, type(self)
        if loop.in_step and self.finished_iter < self.start_iter and cls.after_step is not TrainerBase.after_step:
            raise not_called(cls.__name__, "after_step")
        if self._stop is not None:  # the loop does not look at stop_requested
            loop.other_errors.append(end := self._stop.as_error(cls.__name__))
            raise end
        loop.in_step = True
        self.storage.iter = self.iter
        if loop.begins_epoch:
            loop.begins_epoch = False
            self._begin_epoch()
        self.step_start = time.perf_counter()
        if self.hooks.listeners["before_step"]:
            self.hooks.call("before_step")

    def run_step(self) -> None:
        """Run one iteration. Subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} must define run_step()")

    def after_step(self) -> None:
        """Count the step, call ``after_step`` of all hooks, then evaluate, write metrics and save where it is due."""
        loop = self._loop
        if not loop.in_step:
            raise not_called(type(self).__name__, "before_step")
        loop.in_step = False
        hooks, requests, iteration = self.hooks, self.requests, self.storage.iter
        if self.iter != iteration:
            self._notice_stop()
        self.finished_iter = self.iter
        if self.iter == self.start_iter:
            hooks.warn_of_silent_events()
        if hooks.listeners["after_step"]:
            hooks.call("after_step")
            if self.iter != iteration:
                self._notice_stop()
        if self.epoch_ended:
            loop.begins_epoch = True
            self.after_epoch()
        if loop.sync is not None:
            loop.sync.end_step(self)
        for request, event in _PHASES:
            if request in requests:
                hooks.call(event)
                requests.discard(request)
            elif hooks.listeners[event] and request != "eval":
                hooks.call(event)

    def after_train(self) -> None:
        """End the run: call ``after_train`` of all hooks, write the last metrics, and save unless a step failed."""
        if not self.hooks.running or self.ending:  # the run has not begun
            return
        loop, error = self._loop, sys.exc_info()[1]
        if any(error is other for other in loop.other_errors):
            error = None
        if isinstance(error, StopTraining):  # of a loop that does not catch it
            self._leave_step(error)
        elif error is not None:
            self._fail(error)
        self.ending = True
        self.requests.clear()
        if loop.sync is not None:
            self._attempt(loop.sync.end, self)
        step_failed = self.failed  # errors of the hooks that follow do not keep others from saving
        if not step_failed:
            if self._stop is None and self.iter >= self.max_iter > self.finished_iter + 1:
                self.stop("trainer.iter was set to max_iter")
            self.iter = self.storage.iter = self.finished_iter + 1
            self._attempt(self.prepare_for, "eval")
            if not self.completed:
                # A stopped run may be resumed. Its checkpoint holds the metrics as they are here.
                loop.storage_at_end = self.storage.state_dict()
        try:
            for event in ("after_train", "before_write", "on_write"):
                self.hooks.call(event, on_error=self._fail)
            if not step_failed and not isinstance(self._error, KeyboardInterrupt):  # a second Ctrl-C
                if not self.failed:
                    self._attempt(self.prepare_for, "save")
                self.run_complete = self.completed
                self.hooks.call("on_save", on_error=self._fail)
            self.hooks.call("after_run", on_error=self._fail)
        finally:
            self.hooks.running = self.ending = False
            loop.sync, loop.other_errors = None, []  # an exception keeps all frames alive that it has passed
            self._run_ended()
        if self._error is not None:  # also if it is on its way: a subclass's after_train() ends here
            raise self._error

    def _begin(self) -> None:
        """Prepare for the steps from ``start_iter`` to ``max_iter``, in the open storage."""
        ours = logging.getLogger("hookline")
        if not logger.hasHandlers() and ours.level == logging.NOTSET and ours.propagate:  # a script has set nothing up
            setup_logger(distributed_rank=comm.get_rank())
        logger.info("Starting training from iteration %d", self.start_iter)
        starts_over = self.finished_iter >= 0 and self.start_iter != self.finished_iter + 1
        self.storage = get_event_storage()
        if not starts_over and self._loop.storage is not None:
            self.storage.load_state_dict(self._loop.storage.state_dict())
        self._loop = LoopState(self.storage, other_errors=[sys.exc_info()[1]])
        self._reset(self.start_iter)
        self.hooks.start(reset=starts_over)
        if comm.get_world_size() > 1:
            self._loop.sync = RankSync(self)

    def _begin_epoch(self) -> None:
        """Begin an epoch, or continue it in another ``train()``. Called by the first step."""

    def _leave_step(self, stop: StopTraining) -> None:
        """Stop at once, without the step that is not finished: it, or a method of a subclass, has raised ``stop``."""
        if self._loop.sync is not None:  # all ranks must give up the same step
            self._loop.sync.wait_for_stop(self.iter, str(stop))
        self.stop(str(stop))

    def _run_ended(self) -> None:
        """Release what belongs to the run, at its very end, whatever has failed."""

    def _notice_stop(self) -> None:
        """Take ``trainer.iter = trainer.max_iter``, by which hooks of detectron2 stop training, as a request."""
        if self.iter >= self.max_iter:
            self.iter = self.storage.iter
            self.request_stop("trainer.iter was set to max_iter")

    def prepare_for(self, what: Request) -> None:
        """Do what must come before an evaluation, before metrics are written, and before a checkpoint is saved.

        A hook that acts in ``on_eval``, ``on_write`` or ``on_save`` calls this first, on all ranks. They combine their
        metrics, ``before_write`` is called if metrics will be written, and a SimpleTrainer checks losses and weights.
        """
        if self._loop.prepared.get(what) == self.iter:
            return
        self._loop.prepared[what] = self.iter
        if self._loop.sync is not None:
            self._loop.sync.share_metrics(self, writing=what == "write")
        if what == "write":
            self.hooks.call("before_write")

    # ------------------------------------------------------------------ errors

    def _attempt(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Record an error. The first one goes to ``on_exception`` and is raised; later ones are added as notes."""
        if isinstance(error, SystemExit) and not error.code:
            error = as_failure(error, self.iter)
        self.run_complete = False
        if error is self._error:
            return
        if self._error is not None:
            logger.error("Another exception, after the one that ended training", exc_info=error)
            self._error.add_note(f"then also: {type(error).__name__}: {error}")
            return
        self._error = error
        if isinstance(error, ConfigError) and self.finished_iter >= self.start_iter:
            error.exit_code = 1
        log_error(error, self.iter)
        self.hooks.call("on_exception", (error,), on_error=self._fail)

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
        if changed and self.hooks.running:
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
        """Whether the run ends early on purpose, for example by early stopping."""
        return self._error is None and self._stop is not None and not self._stop.exit_code

    @property
    def stop_reason(self) -> str:
        """Why the run stops early: the argument of ``request_stop`` or ``StopTraining``. Empty if it does not."""
        return "" if self._stop is None else self._stop.reason

    @property
    def failed(self) -> bool:
        """Whether the run ends with an error."""
        return self._error is not None

    # ------------------------------------------------------------------ requests

    def replay_command(self, iteration: int) -> str:
        """Return the shell command that repeats a step, for messages; empty if there is none."""
        return ""

    def request_stop(self, reason: str = "", exit_code: int = 0) -> None:
        """Stop training after the current step. The first request counts, but an interruption yields to a stop.

        With several ranks, one rank may request it: all ranks stop at the end of the same step, within about a second.

        Args:
            reason: returned by :meth:`train`, and logged.
            exit_code: not 0 if the run is interrupted and should be resumed (a signal, a time limit). Its checkpoint
                is named by the iteration instead of ``model_final``, and the program exits with this code.
        """
        reason, sync = reason or "stop requested", self._loop.sync
        if sync is None or self.ending:
            self.stop(reason, exit_code)
        else:
            sync.stop = StopRequest(reason, exit_code).instead_of(sync.stop)

    def stop(self, reason: str, exit_code: int = 0) -> None:
        """Stop training after the current step. Every rank must call it in the same step; see :meth:`request_stop`."""
        self._stop = StopRequest(reason, exit_code).instead_of(self._stop)

    @property
    def stop_requested(self) -> bool:
        """Whether the loop must end after the current step."""
        return self._stop is not None

    def request_save(self) -> None:
        """Save a checkpoint at the end of the current step, or with several ranks within about a second, on all."""
        self._request("save")

    def request_write(self) -> None:
        """Write metrics at the end of the current step; see :meth:`request_save`."""
        self._request("write")

    def request_eval(self) -> None:
        """Evaluate at the end of the current step; see :meth:`request_save`."""
        self._request("eval")

    def _request(self, what: Request) -> None:
        sync = self._loop.sync
        if sync is None or (what != "eval" and not sync.same_hooks):  # each rank acts by itself
            self.requests.add(what)
        else:
            sync.requests.add(what)

    def clock(self) -> float:
        """Seconds since training began. With several ranks: rank 0's value at the last exchange, the same on all."""
        loop = self._loop
        return time.monotonic() - loop.began if loop.sync is None else loop.sync.clock

    @property
    def ranks_in_sync(self) -> bool:
        """Whether there are several ranks with the same hooks. Hooks may then call collectives in their events."""
        return self._loop.sync is not None and self._loop.sync.same_hooks

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint: the last finished iteration, states of hooks, recent metrics."""
        state: dict[str, Any] = {"iteration": self.finished_iter, "complete": self.run_complete}
        if hooks := self.hooks.state_dict():
            state["hooks"] = hooks
        if self.hooks.running:
            state["storage"] = self._loop.storage_at_end or self.storage.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state. :attr:`iter` becomes the last finished iteration, so training continues at ``iter + 1``.

        During training nothing is loaded, with a warning: a hook that loads a checkpoint gets the model's weights only.
        """
        if self.hooks.running:
            logger.warning(
                "A checkpoint was loaded during training: the model has its weights now. Iteration (%d), optimizer, "
                "hooks and data stay as they are. Load it before train(), or set CHECKPOINT.LOAD_BEST_AT_END",
                self.iter,
            )
            return
        self.iter = self.finished_iter = state_dict["iteration"]
        self._stop = self._error = None
        end = state_dict.get("end") or {}  # of the version before: how the run ended
        self.run_complete = state_dict.get("complete", end.get("reason") == "completed" and end["complete"])
        self.hooks.load_state_dict(state_dict.get("hooks", {}))
        vars(self).pop("storage", None)
        self._loop = LoopState()
        if "storage" in state_dict:
            self.storage = self._loop.storage = EventStorage(self.finished_iter + 1)
            self.storage.load_state_dict(state_dict["storage"])
