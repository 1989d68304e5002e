"""Trainers with a loop of their own, which calls ``before_train``, ``before_step``, ``after_step``, ``after_train``."""

import sys
from contextlib import ExitStack, nullcontext
from typing import Any

from ...config import ConfigError
from ...hooks.event_storage import EventStorage, get_event_storage

__all__ = ["OpenStorage", "OwnLoop"]


class OpenStorage:
    """The attribute ``storage`` of a trainer that has not trained: the open one, if another trainer calls its steps."""

    def __get__(self, trainer: Any, owner: Any = None) -> EventStorage:
        return get_event_storage()


class OwnLoop:
    """Does for a subclass's own loop, as many projects of detectron2 have, what ``TrainerBase._train`` does.

    It begins with the first of these methods that calls its parent's, and ends with ``after_train``. A step without
    ``after_step`` has failed, or was left, and is not counted.

    Args:
        trainer: the trainer; the loop has opened its storage.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._handled = sys.exc_info()[1]  # the exception that is being handled outside of the loop, or None
        self._in_step = False
        self._stop: BaseException | None = None  # raised to end the loop
        self._resources = ExitStack()
        self._resources.enter_context(getattr(trainer, "_in_output_dir", nullcontext)())
        loaded = trainer._prepare(trainer.start_iter, trainer.max_iter, None)
        trainer.storage = trainer._last_storage = get_event_storage()
        trainer.storage.load_state_dict(loaded.state_dict())
        self.ending = False

    @classmethod
    def of(cls, trainer: Any) -> "OwnLoop":
        """Return the loop of a trainer. It begins with the first of these methods that the loop calls."""
        if trainer._own_loop is None:
            trainer._own_loop = cls(trainer)
        return trainer._own_loop

    def begin_step(self) -> None:
        """Begin a step, or end a loop that cannot see requests to stop, when there is one."""
        trainer = self._trainer
        if (request := trainer._stop) is not None:
            if request.exit_code:  # as the commands do after an interruption
                self._stop = SystemExit(request.exit_code)
            else:
                self._stop = RuntimeError(
                    f"training was asked to stop ({request.reason}), but the trainer has a training loop of its own, "
                    "which goes on. The run ends here, with its final checkpoint. To stop without this error, have the "
                    "loop check self.stopped, or call TrainerBase.train(self, start_iter, max_iter) in place of it"
                )
            raise self._stop
        if self._in_step and type(trainer).after_step.__qualname__ != "TrainerBase.after_step":
            raise ConfigError(
                f"{type(trainer).__name__}.after_step() does not call super().after_step(), and the trainer has a "
                "training loop of its own: its steps would not be counted"
            )
        trainer._begin_step()
        self._in_step = True

    def finish_step(self) -> None:
        """Count the step, before the hooks' ``after_step``."""
        if not self._in_step:
            raise ConfigError(
                f"{type(self._trainer).__name__} has a training loop of its own, which does not call the parent's "
                "before_step(): its iterations would not be counted"
            )
        self._in_step = False
        self._trainer._step_done()

    def end(self) -> None:
        """End the run, in ``after_train``."""
        trainer, error = self._trainer, sys.exc_info()[1]
        self.ending = True
        with self._resources:
            if error not in (None, self._handled, self._stop):
                trainer._requests.clear()
                trainer._fail(error)
            try:
                trainer._end_run()
            finally:
                trainer._own_loop = None
        if trainer._error is not None and error in (None, self._handled, self._stop):
            raise trainer._error
