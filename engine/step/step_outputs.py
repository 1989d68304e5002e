"""The batch and the model's outputs of a step, for hooks that ask for them."""

import weakref
from collections.abc import Callable
from typing import Any

from ...hooks.base import HookBase
from ...hooks.common import unwrap_model


class KeptForHooks:
    """A trainer's attribute ``batch`` or ``outputs``: an error says when it is not there."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: object, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        raise AttributeError(
            f"trainer.{self._name} is not there: it is kept from after_forward to after_step if a hook has "
            "uses_outputs = True (of a function: trainer.on(..., uses_outputs=True)), and if "
            f"{type(trainer).__name__}.run_step() calls self.forward(batch)"
        )


class StepOutputs(HookBase):
    """Keeps ``trainer.batch`` and ``trainer.outputs`` of the last forward pass until all ``after_step`` are done.

    It takes part in a run only if a hook has ``uses_outputs``. The trainer's ``forward`` is then replaced by one that
    watches the model.
    """

    def __init__(self, trainer: object) -> None:
        self._trainer: Callable[[], Any] = weakref.ref(trainer)
        self._watching = False
        self._handle: Any = None

    def bind(self, asked: bool) -> None:
        """Start or stop to watch the model."""
        trainer = self._trainer()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            del trainer.forward
        if asked:
            self._handle = unwrap_model(trainer.model).register_forward_hook(self._see)
            trainer.forward = self._forward
            for event in ("after_step", "after_train"):  # after all hooks
                trainer.hooks.listeners[event] += (trainer.hooks.entry(self, event),)

    def _forward(self, batch: Any) -> Any:
        trainer = self._trainer()
        trainer.batch, self._watching = batch, True
        try:
            return type(trainer).forward(trainer, batch)
        finally:
            self._watching = False

    def _see(self, module: Any, inputs: Any, output: Any) -> None:
        if self._watching:  # not in an evaluation
            self._trainer().outputs = output

    def after_step(self) -> None:
        kept = vars(self._trainer())
        kept.pop("batch", None)
        kept.pop("outputs", None)

    after_train = after_step  # an error in a step skips after_step
