"""What lets trainers written for detectron2's DefaultTrainer run: there it holds another trainer, here it is one."""

import weakref
from typing import Any

from ..simple_trainer import SimpleTrainer
from ..train_loop import TrainerBase

__all__ = ["PortedTrainer"]

# What makes up a SimpleTrainer beside the hooks and the loop.
_PARTS = (
    "model",
    "data_loader",
    "optimizer",
    "gather_metric_period",
    "zero_grad_before_forward",
    "async_write_metrics",
    "adapter",
    "accumulation_steps",
    "clip_gradients",
    "precision",
    "grad_scaler",
    "device",
    "nonfinite",
    "strategy",
    "_ranks",
    "_rank_rngs",
    "_whole_step",
    "_batches",
    "_given_length",
    "_fast",
    "_rng",
)


class PortedTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` with the ``_trainer`` of detectron2's DefaultTrainer.

    Reading it gives the trainer itself. Setting it, in a subclass that builds its own parts, takes over the other
    trainer's model, data and optimizer. Calling ``__init__`` without arguments makes a trainer that has no parts
    yet, as calling detectron2's TrainerBase does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            super().__init__(*args, **kwargs)
        else:
            TrainerBase.__init__(self)

    @property
    def _trainer(self) -> Any:
        return self if type(self).run_step is SimpleTrainer.run_step else _Inner(self)

    @_trainer.setter
    def _trainer(self, other: SimpleTrainer) -> None:
        for name in _PARTS:
            setattr(self, name, getattr(other, name))
        self._batches.listener = weakref.proxy(self)


class _Inner:
    """A trainer as its own ``_trainer``, where ``run_step`` is overridden to call ``self._trainer.run_step()``."""

    def __init__(self, trainer: SimpleTrainer) -> None:
        object.__setattr__(self, "_outer", trainer)

    def run_step(self) -> None:
        SimpleTrainer.run_step(self._outer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._outer, name, value)
