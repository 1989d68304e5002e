"""Trainers whose own loop calls ``before_train``, ``before_step``, ``after_step`` and ``after_train``."""

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from ...hooks.base import HookBase

__all__ = ["begin_own_loop"]


def begin_own_loop(trainer: Any) -> None:
    """Prepare a run whose loop is the subclass's own: ``before_train`` was called, and not by :meth:`_train`.

    Until ``after_train``, the trainer's ``before_step``, ``after_step`` and ``after_train`` do what ``_train`` does
    besides calling them.
    """
    storage, own_loop, this = trainer.storage, _OwnLoop(sys.exc_info()[1]), weakref.ref(trainer)
    own_loop.resources.enter_context(trainer._in_output_dir())
    trainer._hooks = [hook for hook in trainer._hooks if not isinstance(hook, _OwnLoop)]
    trainer.register_hooks([own_loop])
    trainer._prepare(trainer.start_iter, trainer.max_iter, None)
    trainer._use_storage(storage)
    for name, function in (("before_step", _before_step), ("after_step", _after_step), ("after_train", _after_train)):
        setattr(trainer, name, _method(function, this))


def _method(function: Callable[[Any], None], this: Callable[[], Any]) -> Callable[[], None]:
    return lambda: function(this())


def _before_step(trainer: Any) -> None:
    trainer._begin_step()
    type(trainer).before_step(trainer)


def _after_step(trainer: Any) -> None:
    trainer._finish_step()
    type(trainer).after_step(trainer)
    trainer._end_step()


def _after_train(trainer: Any) -> None:
    for name in ("before_step", "after_step", "after_train"):
        delattr(trainer, name)
    own_loop = trainer.find_hook(_OwnLoop)
    with own_loop.resources:
        error = sys.exc_info()[1]
        if trainer._error is None and error not in (None, own_loop.error_before, own_loop.stop):
            trainer._requests.clear()
            trainer._fail(error)
        trainer._end_run()
    trainer.remove_hook(own_loop)


class _OwnLoop(HookBase):
    """Ends a loop that cannot see requests to stop, when there is one.

    Args:
        error_before: the exception that was being handled when the loop began, or None.
    """

    def __init__(self, error_before: BaseException | None) -> None:
        self.error_before = error_before
        self.stop: BaseException | None = None
        self.resources = ExitStack()  # closed when the loop has ended

    def before_step(self) -> None:
        request = cast(Any, self.trainer)._stop
        if request is None:
            return
        if request.exit_code:  # as the commands do after an interruption
            self.stop = SystemExit(request.exit_code)
        else:
            self.stop = RuntimeError(
                f"training was asked to stop ({request.reason}), but the trainer has a training loop of its own, which "
                "goes on. The run ends here, with its final checkpoint. To stop without this error, have the loop "
                "check self.stopped, or call TrainerBase.train(self, start_iter, max_iter) in place of the loop"
            )
        raise self.stop
