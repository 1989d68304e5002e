"""Trainers whose own loop calls ``before_train``, ``before_step``, ``after_step`` and ``after_train``."""

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

__all__ = ["OwnLoop"]


class OwnLoop:
    """Does for a subclass's own loop what ``TrainerBase.train`` does besides calling these methods.

    The run begins with the first of the methods that calls its parent's, and ends with ``after_train``. If the
    subclass's ``after_step`` never calls its parent's, a step is finished when the next one begins. Otherwise a step
    without ``after_step`` has failed, or was left, and is not counted.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer: Any = weakref.proxy(trainer)
        self._in_step = False
        owner = next(cls for cls in type(trainer).__mro__ if "after_step" in vars(cls))
        self._finishes_late = not owner.__module__.startswith("hookline.")
        self._iter = -1  # of the last step
        self._error_before = sys.exc_info()[1]  # the exception that is being handled now, or None
        self._stop: BaseException | None = None  # raised to end the loop
        self._resources = ExitStack()  # closed when the loop has ended
        self._resources.enter_context(trainer._in_output_dir())
        storage = trainer.storage
        trainer._prepare(trainer.start_iter, trainer.max_iter, None)
        trainer._use_storage(storage)

    @classmethod
    def of(cls, trainer: Any) -> "OwnLoop":
        """Return the own loop of a trainer, which begins with the first call."""
        if trainer._own_loop is None:
            begun = cls(trainer)
            trainer._own_loop = begun
        own_loop: OwnLoop = trainer._own_loop
        return own_loop

    def begin_step(self) -> None:
        """Begin a step, or end a loop that cannot see requests to stop, when there is one."""
        self._finish_late()
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
        self._in_step, self._iter = True, self._trainer.iter

    def finish_step(self) -> None:
        """Count the step."""
        self._finishes_late = False
        if not self._in_step:  # before_step() was not called, or not its parent's
            self.begin_step()
        self._trainer._finish_step()

    def end_step(self) -> None:
        """End the step, after the hooks' ``after_step``."""
        self._in_step = False
        self._trainer._end_step()

    def _finish_late(self) -> None:
        """Finish the step that was begun last, if nothing else does."""
        if self._in_step and self._finishes_late:
            trainer, self._trainer.iter, now = self._trainer, self._iter, self._trainer.iter
            trainer._finish_step()
            self.end_step()
            trainer.iter = now

    def end(self, after_train: Callable[[], None]) -> None:
        """End the run; ``after_train``: see :meth:`TrainerBase._end_run`."""
        trainer, error = self._trainer, sys.exc_info()[1]
        trainer._in_loop = True
        try:
            with self._resources:
                if error in (None, self._error_before):
                    self._finish_late()
                elif trainer._error is None and error is not self._stop:
                    trainer._requests.clear()
                    trainer._fail(error)
                trainer._end_run(after_train)
        finally:
            trainer._in_loop, trainer._own_loop = False, None
