"""Support for trainers written for detectron2's DefaultTrainer.

Such a trainer may skip ``DefaultTrainer.__init__`` and set its parts itself, hold an inner trainer as ``_trainer``, and
have a training loop of its own.
"""

import sys
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MethodType
from typing import Any, cast

from torch import nn

from ...hooks.base import HookBase
from ..parallel.base import strategy_of
from ..ranks.agreement import StopRequest
from ..simple_trainer import SimpleTrainer
from ..step.step_outputs import StepOutputs
from ..train_loop import TrainerBase, TrainResult

__all__ = ["PortedTrainer"]


class _Step:
    """``run_step``: that of the inner trainer if there is one. The loop looks it up once per run."""

    def __get__(self, trainer: "PortedTrainer | None", owner: Any = None) -> Any:
        if trainer is None:
            return SimpleTrainer.run_step
        inner = getattr(trainer, "_inner", None)
        return MethodType(SimpleTrainer.run_step, trainer) if inner is None else inner.run_step


class PortedTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` for subclasses written for detectron2's DefaultTrainer.

    - Without ``__init__``, or with ``__init__()``, it has the parts that the subclass sets: ``model``, ``optimizer``,
      ``data_loader``. The rest of a SimpleTrainer is added before the first training, saving, loading or evaluation.
    - ``_trainer`` is the inner trainer. If a subclass sets it, its ``run_step`` is the step, and its ``state_dict``
      belongs to the checkpoint. Both trainers share all attributes, so the events of its step reach the hooks of this
      trainer. If it is not set, it is this trainer, without the subclass's ``run_step`` and state.
    - A subclass may have its own loop that calls ``before_train``, ``before_step``, ``after_step`` and ``after_train``.
    """

    # Not in __dict__, which is shared with the inner trainer: a reference to that trainer there would be a cycle.
    __slots__ = ("_inner", "_view")

    _inner: Any
    _view: Any
    run_step = _Step()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            super().__init__(*args, **kwargs)
        else:
            TrainerBase.__init__(self)

    # ------------------------------------------------------------------ the inner trainer

    @property
    def _trainer(self) -> Any:
        inner = getattr(self, "_inner", None)
        if inner is not None:
            return inner
        if getattr(self, "_view", None) is None:
            cls, names = type(self), ("run_step", "state_dict", "load_state_dict")
            methods = {name: getattr(SimpleTrainer, name) for name in names}
            self._view = object.__new__(type(cls.__name__, (cls,), methods))
            self._view.__dict__ = self.__dict__
        return self._view

    @_trainer.setter
    def _trainer(self, inner: TrainerBase) -> None:
        if not isinstance(inner, TrainerBase):
            raise TypeError(f"_trainer must be a trainer, such as a SimpleTrainer, not {inner!r}")
        own, new = vars(self), vars(inner)
        kept = {*vars(TrainerBase())}
        if own.get("model") is not None and own["model"] is new.get("model"):
            kept |= {"adapter", "device", "strategy", "_averaging_ranks", "_given_length"} & own.keys()
            if own.get("data_loader") is new.get("data_loader"):
                kept |= {"_batches"} & own.keys()
        own.update({name: value for name, value in new.items() if name not in kept})
        self.register_hooks(inner._hooks)
        self._inner, inner.__dict__ = inner, own
        if "_batches" in own:
            self._batches.listener = weakref.proxy(self)

    def _add_missing_parts(self) -> None:
        """Add the parts of a SimpleTrainer that the subclass has not set."""
        own = vars(self)
        if "nonfinite" in own and "optimizer" in own:  # set by SimpleTrainer.__init__, or added
            return
        loader = own.get("data_loader")
        parts = SimpleTrainer(
            nn.Identity(),  # not the model: it would be set to train mode
            iter(()) if loader is None else loader,
            own.get("optimizer") or (),
            strategy=strategy_of(own["model"]) if "model" in own else None,
        )
        for name in vars(parts).keys() - {"model", "data_loader", "_step_outputs"}:
            own.setdefault(name, getattr(parts, name))
        self._batches.listener = weakref.proxy(self)

    def _bind_hooks(self) -> None:
        if "_step_outputs" not in vars(self):
            self._step_outputs = StepOutputs(self)
        super()._bind_hooks()

    def _train(self, *args: Any, **kwargs: Any) -> TrainResult:
        self._add_missing_parts()
        return super()._train(*args, **kwargs)

    def _prepare(self, start_iter: int, max_iter: int, stop: StopRequest | None) -> None:
        self._add_missing_parts()
        super()._prepare(start_iter, max_iter, stop)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        self._add_missing_parts()
        state, inner = super().state_dict(), getattr(self, "_inner", None)
        if inner is None or type(inner).state_dict in (SimpleTrainer.state_dict, TrainerBase.state_dict):
            return state
        return {**state, **inner.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._add_missing_parts()
        super().load_state_dict(state_dict)
        inner = getattr(self, "_inner", None)
        if inner is None or type(inner).load_state_dict in (SimpleTrainer.load_state_dict, TrainerBase.load_state_dict):
            return
        inner.load_state_dict(state_dict)

    # ------------------------------------------------------------------ a loop of the subclass's own

    def before_train(self) -> None:
        if not self._running:
            storage, own_loop = self.storage, _OwnLoop(sys.exc_info()[1])
            own_loop.resources.enter_context(self._in_output_dir())
            self._hooks = [hook for hook in self._hooks if not isinstance(hook, _OwnLoop)]
            self.register_hooks([own_loop])
            self._prepare(self.start_iter, self.max_iter, None)
            self._use_storage(storage)
        super().before_train()

    def after_train(self) -> None:
        own_loop = self.find_hook(_OwnLoop)
        if own_loop is None:
            super().after_train()
            return
        with own_loop.resources:
            error = sys.exc_info()[1]
            if self._error is None and error not in (None, own_loop.error_before, own_loop.stop):
                self._requests.clear()
                self._fail(error)
            super().after_train()
        self.remove_hook(own_loop)

    def _in_output_dir(self) -> AbstractContextManager[None]:
        """Return a context in which the run has OUTPUT_DIR. :meth:`DefaultTrainer.train` enters it."""
        return nullcontext()


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
