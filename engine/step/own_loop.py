"""Trainers whose own loop calls ``before_train``, ``before_step``, ``after_step`` and ``after_train``."""

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

__all__ = ["OwnLoop"]

_METHODS = {"before_step", "after_step", "after_train"}


class OwnLoop:
    """Does for a subclass's own loop what ``TrainerBase.train`` does besides calling these methods.

    The run begins with the first of the methods that calls its parent's, mostly ``before_train``, and ends with
    ``after_train``. From then on the loop's calls come here first, so the subclass's methods need not call their
    parents'. A step whose ``after_step`` is not called has failed, or was left, and is not counted.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._reference = weakref.ref(trainer)
        self._in_step = False
        self._error_before = sys.exc_info()[1]  # the exception that is being handled now, or None
        self._stop: BaseException | None = None  # raised to end the loop
        self._resources = ExitStack()  # closed when the loop has ended
        self._resources.enter_context(trainer._in_output_dir())
        storage = trainer.storage
        trainer._prepare(trainer.start_iter, trainer.max_iter, None)
        trainer._use_storage(storage)
        for name in _METHODS - vars(trainer).keys():
            vars(trainer)[name] = getattr(self, name)

    @property
    def _trainer(self) -> Any:
        return self._reference()

    @classmethod
    def of(cls, trainer: Any) -> "OwnLoop":
        """Return the own loop of a trainer, which begins with the first call."""
        if trainer._own_loop is None:
            begun = cls(trainer)
            trainer._own_loop = begun
        own_loop: OwnLoop = trainer._own_loop
        return own_loop

    @staticmethod
    def leave(trainer: Any) -> None:
        """Forget the own loop of a trainer."""
        for name in _METHODS & vars(trainer).keys():
            if getattr(vars(trainer)[name], "__self__", None) is trainer._own_loop is not None:
                del vars(trainer)[name]
        trainer._own_loop = None

    def before_step(self) -> None:
        self.begin_step()
        self._call("before_step")

    def after_step(self) -> None:
        self.finish_step()
        self._call("after_step")
        self._in_step = False
        if self._trainer._in_step:
            self._trainer._end_step()

    def after_train(self) -> None:
        trainer = self._trainer
        self.end(lambda: trainer.__class__.after_train(trainer))

    def _call(self, name: str) -> None:
        """Call the class's method, in which the parents' do nothing else than call the hooks."""
        trainer = self._trainer
        trainer._in_loop = True
        try:
            getattr(trainer.__class__, name)(trainer)
        finally:
            trainer._in_loop = False

    def begin_step(self) -> None:
        """Begin a step, or end a loop that cannot see requests to stop, when there is one."""
        request = self._trainer._stop
        if request is not None:
            if request.exit_code:  # as the commands do after an interruption
                self._stop = SystemExit(request.exit_code)
            else:
                self._stop = RuntimeError(
                    f"training was asked to stop ({request.reason}), but the trainer has a training loop of its own, "
                    "which goes on. The run ends here, with its final checkpoint. To stop without this error, have the "
                    "loop check self.stopped, or call TrainerBase.train(self, start_iter, max_iter) in place of it"
                )
            raise self._stop
        self._trainer._begin_step()
        self._in_step = True

    def finish_step(self) -> None:
        """Count the step."""
        if not self._in_step:  # before_step() was not called, or not its parent's
            self.begin_step()
        self._trainer._finish_step()

    def end_step(self) -> None:
        """End the step, after the hooks' ``after_step``."""
        self._in_step = False
        self._trainer._end_step()

    def end(self, after_train: Callable[[], None]) -> None:
        """End the run; ``after_train``: see :meth:`TrainerBase._end_run`."""
        trainer, error = self._trainer, sys.exc_info()[1]
        trainer._in_loop = True
        try:
            with self._resources:
                if error not in (None, self._error_before, self._stop) and trainer._error is None:
                    trainer._requests.clear()
                    trainer._fail(error)
                trainer._end_run(after_train)
        finally:
            trainer._in_loop = False
            self.leave(trainer)
