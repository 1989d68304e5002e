"""The loop: steps, the hooks around them, and how it all ends. What a step is, is in ``simple_trainer.py``."""

import logging
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..hooks.base import STEP_EVENTS, HookBase, StopTraining
from ..hooks.host import HookHost, hook_name
from ..hooks.storage.event_storage import EventStorage
from . import comm
from .ranks.agreement import Agreement, HookList, StopRequest
from .ranks.shared_metrics import share_metrics

__all__ = ["HookBase", "TrainResult", "TrainerBase"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        reason: why it ended: "completed", or what was given to ``request_stop``.
        iteration: how many iterations are done, those before a resume included.
        metrics: the last value of every metric.
        exit_code: what the program should end with: 0, or, where the run was stopped before its end and is to be gone
            on with, what was given to ``request_stop`` (docs/checkpoints.md has the list).
    """

    reason: str
    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)
    exit_code: int = 0


class TrainerBase(HookHost):
    """Runs ``run_step`` again and again, and the hooks around it; knows nothing of models or data.

    A subclass defines :meth:`run_step`; see :class:`~hookline.hooks.HookBase` for the order of events.

    Attributes:
        iter: the present iteration, from ``start_iter`` to ``max_iter - 1``, and ``max_iter`` once all are done.
        start_iter: where this run starts.
        max_iter: where it ends. It may be changed while training: hooks with a method ``set_max_iter(max_iter)``, such
            as the learning rate's, are called then.
        epoch: number of passes over the data so far; 0 where there is no notion of it.
        iters_per_epoch: iterations in one pass, or None where that is not known.
        epoch_ended: whether the present step is the last of its epoch.
        storage: the :class:`~hookline.hooks.EventStorage` of the present run.
        comm: the module of rank and collective functions, for hooks.
    """

    epoch: int = 0
    iters_per_epoch: int | None = None
    epoch_ended: bool = False
    comm = comm
    _max_iter: int = 0
    _longest: int = 0  # the largest max_iter that the run has had

    def __init__(self) -> None:
        super().__init__()
        self.iter: int = 0
        self.start_iter: int = 0
        self.storage: EventStorage
        # The last iteration whose step is done, which is what a checkpoint holds; -1 before any.
        self._finished: int = -1
        self._has_state = False  # of an earlier train(), or loaded
        self._stop: StopRequest | None = None
        self._at_last_save = False
        # How the run in the loaded checkpoint ended; None if it had not.
        self._loaded_end: Mapping[str, Any] | None = None
        self._error: BaseException | None = None
        self._requests: set[str] = set()
        self._agreement: Agreement | None = None  # with the other ranks, while several of them train
        self._ends_together = False  # all ranks, with the same hooks
        self._hook_changes = 0
        self._began = 0.0
        self._warned: set[str] = set()
        self._storage_state: Mapping[str, Any] | None = None
        self._state_at_end: Mapping[str, Any] | None = None  # of the storage, as the last step of a stopped run left it

    # ------------------------------------------------------------------ the loop

    def train(self, start_iter: int, max_iter: int) -> TrainResult:
        """Run iterations ``start_iter`` to ``max_iter - 1``. May be called again afterwards.

        Weights and optimizer are used as they are. If ``start_iter`` follows the last finished iteration, hooks
        continue; otherwise they forget the earlier run (:meth:`HookBase.reset_state`).

        Args:
            start_iter: the first iteration.
            max_iter: one beyond the last.

        Returns:
            How the run ended.

        Raises:
            Exception: whatever a step or a hook raises, after every hook's ``after_train``.
            RuntimeError: a step or a hook called ``sys.exit(0)``, which would end the program with success.
        """
        return self._train(start_iter, max_iter)

    def _train(self, start_iter: int, max_iter: int, stop: StopRequest | None = None) -> TrainResult:
        """:meth:`train`; with ``stop`` the run had stopped already, and only its end is left to do."""
        logger.info("Starting training from iteration %d", start_iter)
        starts_over = self._has_state and start_iter != self._finished + 1
        self._has_state = True
        self.iter = self.start_iter = start_iter
        self.max_iter = self._longest = max_iter
        self._finished = start_iter - 1
        self._stop, self._error, self._loaded_end = stop, None, None
        self._at_last_save = False
        self._requests.clear()
        self._began = time.monotonic()
        if starts_over:
            self._reset_hooks()
            self._storage_state = None
        self._start_hooks()
        self._agreement = None
        if comm.get_world_size() > 1:
            self._hook_changes = 0
            self._agreement = Agreement(start_iter, self._hook_list())
        logger.debug("Hooks, in the order they are called in:\n%s", self.describe_hooks())
        self.storage, self._state_at_end = EventStorage(start_iter), None
        if self._storage_state is not None:  # a resume: windows go on where they were
            self.storage.load_state_dict(self._storage_state)
            self._storage_state = None
        with self.storage:
            try:
                try:
                    self.before_train()
                    while self.iter < self.max_iter and self._stop is None:
                        self.before_step()
                        self.run_step()
                        self.after_step()
                        self.iter += 1
                except StopTraining as given_up:  # raised by a step; those of hooks are requests already
                    self._give_up_step(given_up)
            except BaseException as error:
                self._requests.clear()  # of a step that will not end
                failure = self._fail(error)
                if failure is error:
                    raise
                raise failure from error
            finally:
                self.after_train()
            metrics = {name: value for name, (value, _) in self.storage.latest().items()}
        end = self._stop
        if end is None or (end.exit_code and self.completed):  # an interruption that came too late
            end = StopRequest("completed")
        logger.info("Training ended at iteration %d: %s", self.iter, end.reason)
        return TrainResult(end.reason, self.iter, metrics, end.exit_code)

    def _give_up_step(self, stop: StopTraining) -> None:
        """A step ends with ``StopTraining``, and training with it, if it does so on all ranks."""
        reason = str(stop) or "stop requested"
        if self._agreement is not None:
            try:
                self._agreement.wait_for_stop(self.iter)
            except TimeoutError as missing:
                raise RuntimeError(
                    f"StopTraining({reason!r}) was raised in step {self.iter} of rank {comm.get_rank()}, and not on "
                    f"all ranks: the others cannot finish a step that one gives up ({missing}). Where one rank wants "
                    "to stop, call trainer.request_stop(reason) instead: all then end with the same step"
                ) from stop
        self._stop_with(StopRequest(reason))

    def request_stop(self, reason: str = "", exit_code: int = 0, everywhere: bool = False) -> None:
        """End training after the current step. The first request counts.

        In the same step, a stop on purpose counts before an interruption. One rank may request it alone: all ranks
        then stop at the end of the same step, about a second later. The other requests work in the same way.

        Args:
            reason: returned by :meth:`train`, and logged.
            exit_code: not 0 if the run is only interrupted (a signal, a time limit). Its checkpoint is then named by
                the iteration, not ``model_final``, and the program exits with this code, so that it can be restarted.
            everywhere: every rank makes this request in this step, so no exchange is needed.
        """
        by = None if exit_code else self._asking_hook()  # an interrupted run is resumed in any case
        request = StopRequest(reason or "stop requested", exit_code, by)
        if self._agreement is not None and self._agreement.needs_exchange("stop", everywhere):
            self._agreement.ask(request)
        else:
            self._stop_with(request)

    def _stop_with(self, request: StopRequest) -> None:
        if request.outranks(self._stop):
            self._stop = request

    def request_save(self, everywhere: bool = False) -> None:
        """Save a checkpoint at the end of the current step; ``everywhere`` as for :meth:`request_stop`."""
        self._request("on_save", everywhere)

    def request_write(self, everywhere: bool = False) -> None:
        """Write metrics at the end of the current step; ``everywhere`` as for :meth:`request_stop`."""
        self._request("on_write", everywhere)

    def request_eval(self, everywhere: bool = False) -> None:
        """Evaluate at the end of the current step; ``everywhere`` as for :meth:`request_stop`."""
        self._request("on_eval", everywhere)

    def _request(self, event: str, everywhere: bool) -> None:
        if self._agreement is not None and self._agreement.needs_exchange(event, everywhere):
            self._agreement.ask(event)
        else:
            self._requests.add(event)

    def clock(self) -> float:
        """Seconds since training began. With several ranks: rank 0's, at the last exchange, the same on all."""
        return time.monotonic() - self._began if self._agreement is None else self._agreement.clock

    @property
    def ranks_in_sync(self) -> bool:
        """Whether there are several ranks with the same hooks. A hook may then call collectives in its events."""
        return self._ends_together or (self._agreement is not None and self._agreement.same_hooks)

    @property
    def max_iter(self) -> int:
        return self._max_iter

    @max_iter.setter
    def max_iter(self, value: int) -> None:
        changed, self._max_iter = value != self._max_iter, value
        if changed and self._running:
            self._longest = max(self._longest, value)
            self._length_changed()

    def _length_changed(self) -> None:
        """``max_iter`` was changed in the middle of a run."""
        self.emit("set_max_iter", self.max_iter)

    @property
    def finished_iter(self) -> int:
        """The last iteration whose step is done: what a checkpoint holds, and one before what a resume starts with."""
        return self._finished

    @property
    def completed(self) -> bool:
        """Whether every iteration up to ``max_iter`` is done and nothing went wrong."""
        return self._error is None and self.iter >= self.max_iter

    @property
    def interrupted(self) -> bool:
        """Whether the run is ending before its time, in good order, to be gone on with: by a signal or a time limit."""
        stop = self._stop
        return self._error is None and stop is not None and bool(stop.exit_code) and self._finished + 1 < self.max_iter

    @property
    def stopped(self) -> bool:
        """Whether the run is ending before its time on purpose, as by early stopping: a resume does not go on."""
        return self._error is None and self._stop is not None and not self._stop.exit_code

    @property
    def failed(self) -> bool:
        """Whether the run is ending with an exception."""
        return self._error is not None

    def before_train(self) -> None:
        self._dispatch("before_train")

    def before_epoch(self) -> None:
        self._dispatch("before_epoch")

    def before_step(self) -> None:
        # For the whole of a step, storage.iter == trainer.iter.
        self.storage.iter = self.iter
        if self._joined or self._left:
            self._change_hooks()
        self._dispatch("before_step")

    def run_step(self) -> None:
        """One iteration: defined by a subclass."""
        raise NotImplementedError(f"{type(self).__name__} must define run_step()")

    def after_backward(self) -> None:
        self._dispatch("after_backward")

    def after_step(self) -> None:
        self._finished = self.iter
        if self.iter == self.start_iter:
            self._warn_of_silent_events()
        self._dispatch("after_step")
        if self.epoch_ended:
            self.after_epoch()
        agreement = self._agreement
        if agreement is not None and (self.iter >= agreement.next_iter or (self._requests and agreement.same_hooks)):
            self._agree(agreement)
        if self._requests:
            self._serve_requests()

    def _agree(self, agreement: Agreement) -> None:
        """Take over the other ranks' requests, and their losses if something is about to be written or saved."""
        events, stop = agreement.exchange(self.iter, self._hook_list())
        self._requests |= events
        if stop is not None:
            self._stop_with(stop)
        if self._requests and agreement.same_hooks:
            share_metrics(self.storage, self._finished)

    def _hook_list(self) -> HookList:
        waiting = len(self._joined) + len(self._left)
        return HookList(tuple(map(hook_name, self._hooks)), self._hook_changes + waiting)

    def _change_hooks(self) -> None:
        self._hook_changes += len(self._joined) + len(self._left)
        super()._change_hooks()

    def _gather_state(self) -> None:
        """All ranks are about to save: bring together what a subclass's state needs of each."""

    def after_epoch(self) -> None:
        self._dispatch("after_epoch")

    def after_train(self) -> None:
        """Give every hook its ``after_train``, whatever the others raise; the first error of the run wins."""
        if self._error is None:
            # Every step that began is done: put what comes now (a last evaluation) after the last of them.
            self.iter = self.storage.iter = self._finished + 1
        before = self._error
        if before is None:
            try:
                self._check_state({"on_eval", "on_save"})
            except BaseException as error:
                self._fail(error)
        self._ends_together = self._end_agreement()
        if self._error is None and not self.completed:
            # What hooks put at this end is not on schedule: a resumed run puts it when it is due.
            self._state_at_end = self.storage.state_dict()
        for event in ("after_train", "before_write", "on_write", "on_save", "after_run"):
            if event == "on_save" and event not in self._requests:
                continue
            if event == "on_save":
                self._at_last_save = self._error is None
                if self._at_last_save and self._ends_together:
                    self._gather_state()
            for one in self._listeners[event]:
                try:
                    self._run((one,), event, (), {})
                except BaseException as error:
                    self._fail(error)
        self._requests.clear()
        self._running = self._ends_together = False
        if self._error is not before:
            raise self._error  # type: ignore[misc]

    def _end_agreement(self) -> bool:
        """All ranks have left the loop; or this one has failed, and can do nothing with the others any more.

        Returns:
            Whether they end together.
        """
        agreement, self._agreement = self._agreement, None
        if agreement is None or not agreement.same_hooks or self._error is not None:
            return False
        try:
            share_metrics(self.storage, self._finished)
        except BaseException as error:
            self._fail(error)
            return False
        return True

    def _check_state(self, requests: set[str]) -> None:
        """Before metrics are written, and before anything is evaluated or saved: raise an error if it must not be.

        Args:
            requests: what is about to happen.
        """

    def _serve_requests(self) -> None:
        """At the end of a step, when all hooks had their say: evaluate, then write, then save all of it."""
        self._check_state(self._requests)
        for event in ("on_eval", "on_write", "on_save"):
            if event in self._requests:
                self._requests.discard(event)
                if event == "on_save" and self._agreement is not None and self._agreement.same_hooks:
                    self._gather_state()
                if event == "on_write":
                    self._dispatch("before_write")
                self._dispatch(event)

    def _warn_of_silent_events(self) -> None:
        """Tell of hooks that wait for events which this trainer's step does not emit."""
        for event in STEP_EVENTS:
            silent = [hook for _, cost, hook in self._listeners[event] if not cost[1]]
            if silent and event not in self._warned:
                self._warned.add(event)
                logger.warning(
                    "%s waits for the event %s, which %s.run_step() did not emit: it will not be called. "
                    "Call self.emit(%r) there, or the method of SimpleTrainer that does",
                    ", ".join(map(hook_name, silent)),
                    event,
                    type(self).__name__,
                    event,
                )

    def _fail(self, error: BaseException) -> BaseException:
        """An error ends the run. All hooks get the first error; later ones are logged and noted on it.

        Returns:
            The error to raise: ``error``, or a RuntimeError in place of a ``sys.exit(0)``.
        """
        if isinstance(error, SystemExit) and not error.code:
            error = _not_a_success(error, self.iter)
        if self._error is not None:
            if error is not self._error:
                logger.error("Another exception, after the one that ended training", exc_info=error)
                self._error.add_note(f"then also: {type(error).__name__}: {error}")
            return error
        self._error = error
        error.logged_by_trainer = True  # type: ignore[attr-defined]
        if isinstance(error, Exception):
            logger.error("Exception during training, at iteration %d", self.iter, exc_info=error)
        else:
            logger.warning("Training is ended by %s, at iteration %d", type(error).__name__, self.iter)
        for one in self._listeners["on_exception"]:
            try:
                self._run((one,), "on_exception", (error,), {})
            except BaseException as other:
                self._fail(other)
        return error

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the trainer: the last finished iteration, hooks' states, windows of metrics.

        Once the run has ended, or is to end with this iteration, also how: see :meth:`_end`.
        """
        state: dict[str, Any] = {"iteration": self.finished_iter}
        end = self._end()
        if end:
            state["end"] = end
        hooks = self._hooks_state()
        if hooks:
            state["hooks"] = hooks
        if self._running:
            state["storage"] = self._state_at_end or self.storage.state_dict()
        return state

    def _end(self) -> dict[str, Any] | None:
        """How the run ends: None if it has not come to its end, was interrupted or failed.

        Returns:
            ``reason``: "completed", or what was given to ``request_stop``; ``iteration``: how many are done;
            ``max_iter``: the largest that the run has had; ``by``: see :class:`StopRequest`; ``complete``: whether
            all is done that comes at the end of a run (a last evaluation, say), as in the final checkpoint.
        """
        done = self._finished + 1
        if self.stopped:
            assert self._stop is not None
            reason, by = self._stop.reason, self._stop.by
        elif self._error is None and done >= self.max_iter > 0:
            reason, by = "completed", None
        else:
            return None
        complete = self._at_last_save
        return {"reason": reason, "iteration": done, "max_iter": self._longest, "by": by, "complete": complete}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; :attr:`iter` becomes the last finished iteration, so go on at ``iter + 1``."""
        self.iter = self._finished = state_dict["iteration"]
        self._has_state, self._stop, self._error, self._at_last_save = True, None, None, False
        self._loaded_end = state_dict.get("end")
        self._load_hooks_state(state_dict.get("hooks", {}))
        self._storage_state = state_dict.get("storage")


def _not_a_success(error: SystemExit, iteration: int) -> RuntimeError:
    """The error for a ``sys.exit(0)`` in the middle of a run, which must not pass for a run that ended well."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    where = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    failure = RuntimeError(
        f"sys.exit({'' if error.code is None else error.code}) was called at iteration {iteration} ({where}), before "
        "the run had ended. To stop training, call trainer.request_stop(reason)"
    )
    failure.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        failure.add_note(note)
    return failure
