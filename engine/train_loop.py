"""The loop: steps, the hooks around them, and how it all ends. What a step is, is in ``simple_trainer.py``."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..hooks.base import STEP_EVENTS, HookBase, StopTraining
from ..hooks.events import EventStorage
from ..hooks.host import HookHost, hook_name
from . import comm

__all__ = ["HookBase", "TrainResult", "TrainerBase"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        reason: why it ended: "completed", or what was given to ``request_stop``.
        iteration: how many iterations are done, those before a resume included.
        metrics: the last value of every metric.
    """

    reason: str
    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)


class TrainerBase(HookHost):
    """Runs ``run_step`` again and again, and the hooks around it; knows nothing of models or data.

    A subclass defines :meth:`run_step`; see :class:`~hookline.hooks.HookBase` for the order of events.

    Attributes:
        iter: the present iteration, from ``start_iter`` to ``max_iter - 1``, and ``max_iter`` once all are done.
        start_iter, max_iter: where this run starts and ends. Changing ``max_iter`` while training is fine.
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

    def __init__(self) -> None:
        super().__init__()
        self.iter: int = 0
        self.start_iter: int = 0
        self.max_iter: int = 0
        self.storage: EventStorage
        # The last iteration whose step is done, which is what a checkpoint holds; -1 before any.
        self._finished: int = -1
        self._stop_reason: str | None = None
        self._error: BaseException | None = None
        self._requests: set[str] = set()
        self._warned: set[str] = set()
        self._storage_state: Mapping[str, Any] | None = None

    # ------------------------------------------------------------------ the loop

    def train(self, start_iter: int, max_iter: int) -> TrainResult:
        """Run iterations ``start_iter`` to ``max_iter - 1``. May be called again afterwards.

        Args:
            start_iter: the first iteration.
            max_iter: one beyond the last.

        Returns:
            How the run ended.

        Raises:
            Exception: whatever a step or a hook raises, after every hook's ``after_train``.
        """
        logger.info("Starting training from iteration %d", start_iter)
        self.iter = self.start_iter = start_iter
        self.max_iter = max_iter
        self._finished = start_iter - 1
        self._stop_reason = self._error = None
        self._requests.clear()
        self._start_hooks()
        logger.debug("Hooks, in the order they are called in:\n%s", self.describe_hooks())
        self.storage = EventStorage(start_iter)
        if self._storage_state is not None:  # a resume: windows go on where they were
            self.storage.load_state_dict(self._storage_state)
            self._storage_state = None
        with self.storage:
            try:
                self.before_train()
                while self.iter < self.max_iter and self._stop_reason is None:
                    self.before_step()
                    self.run_step()
                    self.after_step()
                    self.iter += 1
            except StopTraining as stop:  # raised by a step; those of hooks are requests already
                self.request_stop(str(stop))
            except BaseException as error:
                self._requests.clear()  # of a step that will not end
                self._fail(error)
                raise
            finally:
                self.after_train()
            metrics = {name: value for name, (value, _) in self.storage.latest().items()}
        reason = self._stop_reason or "completed"
        logger.info("Training ended at iteration %d: %s", self.iter, reason)
        return TrainResult(reason, self.iter, metrics)

    def request_stop(self, reason: str = "") -> None:
        """Ask that training end, in good order, with the present step. The first reason given counts."""
        if self._stop_reason is None:
            self._stop_reason = reason or "stop requested"

    def request_save(self) -> None:
        """Ask for a checkpoint at the end of the present step."""
        self._requests.add("on_save")

    def request_write(self) -> None:
        """Ask that metrics be written at the end of the present step."""
        self._requests.add("on_write")

    def request_eval(self) -> None:
        """Ask for an evaluation at the end of the present step."""
        self._requests.add("on_eval")

    @property
    def finished_iter(self) -> int:
        """The last iteration whose step is done: what a checkpoint holds, and one before what a resume starts with."""
        return self._finished

    @property
    def completed(self) -> bool:
        """Whether every iteration up to ``max_iter`` is done and nothing went wrong."""
        return self._error is None and self.iter >= self.max_iter

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
        if self._requests:
            self._serve_requests()

    def after_epoch(self) -> None:
        self._dispatch("after_epoch")

    def after_train(self) -> None:
        """Give every hook its ``after_train``, whatever the others raise; the first error of the run wins."""
        if self._error is None:
            # Every step that began is done: put what comes now (a last evaluation) after the last of them.
            self.iter = self.storage.iter = self._finished + 1
        before = self._error
        for event in ("after_train", "before_write", "on_write", "on_save"):
            if event == "on_save" and event not in self._requests:
                continue
            for one in self._listeners[event]:
                try:
                    self._run((one,), event, (), {})
                except BaseException as error:
                    self._fail(error)
        self._requests.clear()
        self._running = False
        if self._error is not before:
            raise self._error  # type: ignore[misc]

    def _serve_requests(self) -> None:
        """At the end of a step, when all hooks had their say: evaluate, then write, then save all of it."""
        for event in ("on_eval", "on_write", "on_save"):
            if event in self._requests:
                self._requests.discard(event)
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

    def _fail(self, error: BaseException) -> None:
        """An error ends the run: the first is told to all hooks, later ones must not hide it."""
        if self._error is not None:
            if error is not self._error:
                logger.error("Another exception, after the one that ended training", exc_info=error)
                self._error.add_note(f"then also: {type(error).__name__}: {error}")
            return
        self._error = error
        if isinstance(error, Exception):
            logger.error("Exception during training, at iteration %d", self.iter, exc_info=error)
        else:
            logger.warning("Training is ended by %s, at iteration %d", type(error).__name__, self.iter)
        for one in self._listeners["on_exception"]:
            try:
                self._run((one,), "on_exception", (error,), {})
            except BaseException as other:
                self._fail(other)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the trainer: the last finished iteration, hooks' states, windows of metrics."""
        state: dict[str, Any] = {"iteration": self.finished_iter}
        hooks = self._hooks_state()
        if hooks:
            state["hooks"] = hooks
        if self._running:
            state["storage"] = self.storage.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; :attr:`iter` becomes the last finished iteration, so go on at ``iter + 1``."""
        self.iter = self._finished = state_dict["iteration"]
        self._load_hooks_state(state_dict.get("hooks", {}))
        self._storage_state = state_dict.get("storage")


def __getattr__(name: str) -> Any:
    """detectron2 has these two in this module as well."""
    if name in ("SimpleTrainer", "AMPTrainer"):
        from . import simple_trainer

        return getattr(simple_trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
