"""Support for trainers written for detectron2's DefaultTrainer, which holds an inner trainer as ``_trainer``."""

import weakref
from typing import Any

from ..simple_trainer import SimpleTrainer
from ..train_loop import TrainerBase

__all__ = ["PortedTrainer"]


class PortedTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` with detectron2's ``_trainer``, which is the trainer itself.

    A subclass that builds its own parts may set ``_trainer`` to another trainer: this one takes over its model, data,
    optimizer and settings. ``__init__`` without arguments creates a trainer without these parts, as ``__init__`` of
    detectron2's TrainerBase does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            super().__init__(*args, **kwargs)
        else:
            TrainerBase.__init__(self)

    @property
    def _trainer(self) -> Any:
        return self if type(self).run_step is SimpleTrainer.run_step else _InnerTrainer(self)

    @_trainer.setter
    def _trainer(self, other: SimpleTrainer) -> None:
        not_taken = vars(TrainerBase())  # hooks and the loop
        for name, value in vars(other).items():
            if name not in not_taken:
                setattr(self, name, value)
        self._batches.listener = weakref.proxy(self)


class _InnerTrainer:
    """The ``_trainer`` of a trainer that overrides ``run_step``, which may call ``self._trainer.run_step()``."""

    def __init__(self, trainer: SimpleTrainer) -> None:
        object.__setattr__(self, "_outer", trainer)

    def run_step(self) -> None:
        SimpleTrainer.run_step(self._outer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._outer, name, value)
