"""What a step that runs as one unit sees of its trainer."""

from collections.abc import Callable
from typing import Any, NoReturn

from ...hooks.base import STEP_EVENTS

__all__ = ["view_class"]

Refuse = Callable[[str, str], NoReturn]
"""Raises the error of code that cannot run within the unit, from what it does and what to do instead."""


def view_class(trainer_class: type, bases: tuple[type, ...]) -> type:
    """Return the class of the views of a class's trainers.

    Args:
        trainer_class: the class of the trainers.
        bases: classes whose methods replace the trainer's.

    Returns:
        A class whose instances are made from a trainer, an optimizer that replaces the trainer's, and :data:`Refuse`.
        A view has all attributes and methods of its trainer, so that a step has one definition.
    """
    # A default in the trainer's class would hide the trainer's own value.
    defaults = {
        name
        for base in trainer_class.__mro__
        for name, value in vars(base).items()
        if not name.startswith("__") and not hasattr(value, "__get__")
    }
    own = {name for base in (*bases, _TrainerView) for name in (*vars(base), *base.__annotations__)}
    read = {
        name: property(lambda view, name=name: getattr(view._viewed, name))  # type: ignore[misc]
        for name in defaults - own
    }
    return type("TrainerView", (*bases, _TrainerView, trainer_class), read)


class _TrainerView:
    """A trainer within the unit: hooks are not called, and metrics are collected to be put afterwards."""

    _viewed: Any
    _refuse: Refuse
    optimizer: Any
    storage: Any
    _listeners: dict[str, tuple[Any, ...]] = dict.fromkeys(STEP_EVENTS, ())

    def __init__(self, trainer: Any, optimizer: Any, refuse: Refuse) -> None:
        own = {"_viewed": trainer, "_refuse": refuse, "optimizer": optimizer, "storage": _Puts(refuse)}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._viewed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse(
            f"{type(self._viewed).__name__} assigns self.{name}",
            "assign it between steps, such as in after_step, or put numbers by self.storage.put_scalar",
        )

    def after_backward(self) -> None:
        pass

    def _fast_optimizer(self) -> Any:
        return self.optimizer


class _Puts:
    """Collects metrics in place of the storage."""

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse
        self.values: list[tuple[str, Any, bool]] = []

    def put_scalar(
        self,
        name: str,
        value: Any,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
        over_ranks: str | None = None,  # there is one rank
    ) -> None:
        if cur_iter is not None:
            self._refuse(f"the metric {name} is put with a cur_iter", "leave cur_iter out")
        self.values.append((name, value, smoothing_hint))

    def put_scalars(self, *, smoothing_hint: bool = True, cur_iter: int | None = None, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            self.put_scalar(name, value, smoothing_hint, cur_iter)

    def __getattr__(self, name: str) -> Any:
        self._refuse(f"self.storage.{name} is used", "use it between steps, or put_scalar and put_scalars")
