"""Support for trainers written for detectron2's DefaultTrainer; others do not run this code.

- A class with an ``__init__`` of its own may skip ``DefaultTrainer.__init__`` and set ``model``, ``optimizer`` and
  ``data_loader`` itself: it gets :class:`PortedTrainer` as a base class, behind DefaultTrainer.
- An inner trainer may be set as ``_trainer``: see :class:`InnerTrainer`. A trainer without such a class gets one then.
"""

import weakref
from collections.abc import Mapping
from functools import cache, cached_property
from types import MethodType
from typing import Any, cast

from torch import nn

from ..parallel.base import Strategy, strategy_of
from ..simple_trainer import SimpleTrainer
from ..train_loop import TrainerBase

__all__ = ["InnerTrainer", "PortedTrainer", "support"]


def support(cls: type) -> None:
    """Make a subclass of DefaultTrainer that has its own ``__init__`` a :class:`PortedTrainer`."""
    if vars(cls).get("_trainer", cls) is None:  # only declared: it would hide DefaultTrainer's
        del cls._trainer  # type: ignore[attr-defined]
    owner = next(parent for parent in cls.__mro__ if "__init__" in vars(parent))
    if not owner.__module__.startswith("hookline.") and not issubclass(cls, PortedTrainer):
        bases = list(cls.__bases__)
        after = (index for index, base in enumerate(bases) if issubclass(PortedTrainer, base))
        bases.insert(next(after, len(bases)), PortedTrainer)
        cls.__bases__ = tuple(bases)


class InnerTrainer:
    """The attribute ``_trainer`` of a DefaultTrainer, which is kept in its slot ``_inner``.

    If a subclass sets it, its ``run_step`` is the step, and its ``state_dict`` belongs to the checkpoint. Both trainers
    share all attributes, so the events of its step reach the hooks of the outer trainer. If it is not set, it stands
    for the trainer itself, without the subclass's ``run_step`` and state.
    """

    def __get__(self, trainer: Any, owner: Any = None) -> Any:
        return self if trainer is None else _inner(trainer) or _itself(trainer)

    def __set__(self, trainer: Any, inner: Any) -> None:
        if not isinstance(inner, TrainerBase):
            raise TypeError(f"_trainer must be a trainer, such as a SimpleTrainer, not {inner!r}")
        if not isinstance(trainer, PortedTrainer):
            cls = type(trainer)
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__slots__": ()}
            trainer.__class__ = type(cls.__name__, (_Unregistered, cls, PortedTrainer), names)
        own, new, hooks = vars(trainer), vars(inner), inner.hooks.hooks
        kept = {*vars(TrainerBase())}
        if own.get("model") is not None and own["model"] is new.get("model"):
            kept |= {"adapter", "loss_module", "device", "strategy", "_averaging_ranks", "_given_length"} & own.keys()
            if own.get("data_loader") is new.get("data_loader"):
                kept |= {"_batches"} & own.keys()
        own.update({name: value for name, value in new.items() if name not in kept})
        trainer._inner, inner.__dict__ = inner, own
        trainer.register_hooks(hooks)
        if "_batches" in own:
            trainer._batches.listener = weakref.proxy(trainer)


def _inner(trainer: Any) -> Any:
    """Return the inner trainer that was set, or None."""
    return getattr(trainer, "_inner", None)


class _Unregistered:
    """Keeps a class made here from the ``__init_subclass__`` of its other base."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        pass


@cache
def _class_of_itself(cls: Any) -> Any:
    methods = {name: getattr(SimpleTrainer, name) for name in ("run_step", "state_dict", "load_state_dict")}
    return type(cls.__name__, (_Unregistered, cls), {**methods, "__slots__": ()})


def _itself(trainer: Any) -> Any:
    """Return the trainer without the ``run_step`` and the state of its own class, with the same attributes."""
    cls: Any = type(trainer)
    itself = object.__new__(_class_of_itself(cls))
    itself.__dict__ = vars(trainer)
    return itself


class _Step:
    """``run_step``: that of the inner trainer if there is one. The loop looks it up once per run."""

    def __get__(self, trainer: Any, owner: Any = None) -> Any:
        if trainer is None:
            return SimpleTrainer.run_step
        inner = _inner(trainer)
        return MethodType(SimpleTrainer.run_step, trainer) if inner is None else inner.run_step


class PortedTrainer(SimpleTrainer):
    """A :class:`SimpleTrainer` that may be made without arguments, and with an inner trainer.

    What a subclass has not set is added before the first training, saving, loading or evaluation.
    """

    run_step = _Step()
    device = precision = None  # until a SimpleTrainer's __init__ sets them, or _add_missing_parts()
    _given_length = None
    _whole_step = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            super().__init__(*args, **kwargs)
        else:
            TrainerBase.__init__(self)

    @cached_property
    def strategy(self) -> Strategy:  # type: ignore[override]
        """The strategy, for an evaluation before training."""
        self._add_missing_parts()
        return cast(Strategy, vars(self)["strategy"])

    def _add_missing_parts(self) -> None:
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
        for name in vars(parts).keys() - {"model", "data_loader"}:
            own.setdefault(name, getattr(parts, name))
        self._batches.listener = weakref.proxy(self)

    def _hooks_changed(self) -> None:
        if "nonfinite" in vars(self):  # else called again when training starts
            super()._hooks_changed()

    def _begin(self) -> None:
        self._add_missing_parts()
        super()._begin()

    def state_dict(self) -> dict[str, Any]:
        self._add_missing_parts()
        state, inner = super().state_dict(), _inner(self)
        if inner is None or type(inner).state_dict in (SimpleTrainer.state_dict, TrainerBase.state_dict):
            return state
        return {**state, **inner.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._add_missing_parts()
        super().load_state_dict(state_dict)
        inner = _inner(self)
        if inner is None or type(inner).load_state_dict in (SimpleTrainer.load_state_dict, TrainerBase.load_state_dict):
            return
        inner.load_state_dict(state_dict)
