"""``_trainer`` of a DefaultTrainer: detectron2's holds the trainer that does its steps, which a subclass may set."""

import weakref
from collections.abc import Mapping
from typing import Any

from .simple_trainer import SimpleTrainer
from .train_loop import TrainerBase

# What a DefaultTrainer has built from its config, and an inner trainer of the same model was not given.
_FROM_CONFIG = ("adapter", "loss_module", "device", "strategy", "_fast")
# What the outer trainer needs for evaluations, checks and checkpoints.
_PARTS = ("model", "optimizer", "batches", "grad_scaler", "precision", "nonfinite", *_FROM_CONFIG)


def set_inner(trainer: SimpleTrainer, inner: TrainerBase) -> None:
    """Take over the parts of an inner trainer. From now on its ``run_step`` is the step.

    Args:
        trainer: a DefaultTrainer.
        inner: the trainer. It gets the hooks of ``trainer``, so the events of its step reach them.

    Raises:
        TypeError: ``inner`` is not a trainer.
    """
    if not isinstance(inner, TrainerBase):
        raise TypeError(f"_trainer must be a trainer, such as a SimpleTrainer, not {inner!r}")
    is_built = trainer.strategy is not None
    if is_built and trainer.model is getattr(inner, "model", None):
        vars(inner).update({name: getattr(trainer, name) for name in _FROM_CONFIG})
        if trainer.data_loader is getattr(inner, "data_loader", None):
            vars(inner)["batches"] = trainer.batches  # it may know the length of an epoch
    vars(trainer).update({name: value for name, value in vars(inner).items() if name in _PARTS})
    if not is_built:
        trainer.add_missing_parts()
    trainer.batches.listener = weakref.proxy(trainer)
    hooks, inner.hooks = inner.hooks.hooks, trainer.hooks
    trainer.inner_trainer = InnerTrainer(trainer, inner)
    trainer.register_hooks(hooks)


def get_inner(trainer: SimpleTrainer) -> Any:
    """Return the inner trainer, with the present state of the run; or a stand-in if none was set."""
    return _StandIn(trainer) if trainer.inner_trainer is None else trainer.inner_trainer.of(trainer)


class InnerTrainer:
    """An inner trainer that a subclass has set.

    Args:
        outer: the trainer that calls its step.
        inner: the inner trainer.
    """

    def __init__(self, outer: SimpleTrainer, inner: TrainerBase) -> None:
        self._inner = inner
        # Scripts set these on either of the two.
        self._shared = {name: vars(inner)[name] for name in ("model", "optimizer") if name in vars(inner)}
        self._has_state = type(inner).state_dict not in (SimpleTrainer.state_dict, TrainerBase.state_dict)
        self._run = vars(TrainerBase()).keys() - {"hooks"}
        if getattr(type(inner), "forward", None) is SimpleTrainer.forward:
            self._run |= {"forward"}  # which hooks with uses_outputs replace
        outer = weakref.proxy(outer)  # a cycle would keep GPU memory in use
        vars(inner).update(
            request_stop=lambda *args, **options: outer.request_stop(*args, **options),
            stop=lambda *args, **options: outer.stop(*args, **options),
        )

    def of(self, outer: SimpleTrainer) -> Any:
        """Return the inner trainer, at the iteration and with the model and optimizer of the outer one."""
        inner = self._inner
        for name, before in self._shared.items():
            new = getattr(inner, name) if getattr(outer, name) is before else getattr(outer, name)
            self._shared[name] = new
            setattr(outer, name, new)
            setattr(inner, name, new)
        vars(inner).update({name: value for name, value in vars(outer).items() if name in self._run})
        if "storage" in vars(outer):
            inner.storage = outer.storage
        return inner

    def state_dict(self, outer: SimpleTrainer) -> dict[str, Any]:
        """Return the inner trainer's state if its class has one of its own."""
        return self.of(outer).state_dict() if self._has_state else {}

    def load_state_dict(self, outer: SimpleTrainer, state_dict: Mapping[str, object]) -> None:
        if self._has_state:
            self.of(outer).load_state_dict(state_dict)


class _StandIn:
    """The trainer itself, without ``run_step`` and state of a subclass, which call those of ``_trainer``."""

    def __init__(self, trainer: SimpleTrainer) -> None:
        vars(self)["_outer"] = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outer, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._outer, name, value)

    def run_step(self) -> None:
        SimpleTrainer.run_step(self._outer)

    def state_dict(self) -> dict[str, Any]:
        return SimpleTrainer.state_dict(self._outer)

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        SimpleTrainer.load_state_dict(self._outer, state_dict)
