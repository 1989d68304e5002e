"""Garbage collection between steps."""

import gc

from ...config import Duration
from ..base import HOOK_REGISTRY, HookBase
from ..every import Every

__all__ = ["GarbageCollection"]

_FULL = 10
"""Every tenth collection covers all generations. Frozen objects are left out, so it is fast."""


@HOOK_REGISTRY.register()
class GarbageCollection(HookBase):
    """Collects Python's garbage between steps, after the same steps on all ranks.

    Automatic collections make steps longer, and all ranks wait for the slowest. This hook collects once at the start,
    freezes the remaining objects (collections skip them) and turns automatic collection off. In ``after_step`` it
    collects young objects every ``period``, and all objects every tenth time. ``after_train`` restores the
    collector. Puts and saves nothing.

    Args:
        period: a duration.
        freeze: whether to freeze objects that exist at the start.
    """

    single = True

    def __init__(self, period: "Duration | int | str" = 100, freeze: bool = True) -> None:
        self._every = Every(period)
        self._freeze = freeze
        self._collections = 0
        self._started = self._was_enabled = self._unfreeze = False

    def before_train(self) -> None:
        self._every.start()
        self._collections = 0
        self._started, self._was_enabled = True, gc.isenabled()
        gc.collect()
        self._unfreeze = self._freeze and gc.get_freeze_count() == 0
        if self._freeze:
            gc.freeze()
        gc.disable()

    def after_step(self) -> None:
        if self._every(self.trainer):
            self._collections += 1
            gc.collect(1 if self._collections % _FULL else 2)

    def after_train(self) -> None:
        if not self._started:
            return
        self._started = False
        if self._unfreeze:  # objects that were frozen before stay frozen
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
