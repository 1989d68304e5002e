"""Subclasses of BestCheckpointer that choose and save the best weights by themselves."""

import inspect
import logging
import math
from types import FunctionType
from typing import Any

from ..base import HookBase

__all__ = ["OwnChoice", "calls_base"]


class OwnChoice(HookBase):
    """The events and attributes of detectron2's BestCheckpointer, for a subclass that overrides ``_best_checking``.

    It is called after every ``_period``, and at the end of a run that did not fail. The subclass saves by
    ``_checkpointer.save(name)``; a resumed run starts without a best value. The subclass need not call ``__init__``.
    If its ``_best_checking`` calls ``super()``, this class is not used.
    """

    _logger = logging.getLogger(__name__)
    best: Any = ()
    best_metric: Any = None
    best_iter: Any = None
    loaded_iter: int | None = None

    @classmethod
    def give_to(cls, subclass: type[HookBase], base: type[HookBase]) -> None:
        """Replace the events and attributes that ``subclass`` inherits from ``base`` by those of this class."""
        for name, value in vars(base).items():
            if not name.startswith("__") and hasattr(cls, name) and getattr(subclass, name) is value:
                setattr(subclass, name, getattr(cls, name))
        for name in ("_logger", "_update_best", "best", "loaded_iter"):
            if not hasattr(subclass, name):
                setattr(subclass, name, getattr(cls, name))

    def load_best(self) -> None:
        """Do nothing: ``load_at_end`` is not supported."""

    def after_step(self) -> None:
        hook: Any = self
        if hook._every(self.trainer) and self.trainer.iter + 1 != self.trainer.max_iter:
            hook._best_checking()

    def after_train(self) -> None:
        hook: Any = self
        if self.trainer.completed:
            hook._best_checking()

    def _update_best(self, val: float, iteration: int) -> bool:
        """Record a new best value, unless it is NaN or infinite; return whether it is recorded."""
        if not math.isfinite(val):
            return False
        self.best_metric, self.best_iter = val, iteration
        return True


def calls_base(own: FunctionType, owner: type) -> bool:
    """Return whether the code of a method of ``owner`` has ``super()``, or names a class that ``owner`` inherits from.

    Calls that are hidden, for example in a helper, are not found.
    """
    names = {"super", *(parent.__name__ for parent in owner.__mro__[1:])}
    code = inspect.unwrap(own).__code__
    return "__class__" in code.co_freevars or not names.isdisjoint(code.co_names)
