"""What ends a run that should not go on."""

import logging
import signal
import threading
from types import FrameType
from typing import Any

from .base import HOOK_REGISTRY, HookBase

__all__ = ["SignalHandler"]

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class SignalHandler(HookBase):
    """Ctrl-C or SIGTERM ends training in good order after the present step; a second Ctrl-C ends it at once.

    In good order means: the step is finished, metrics are written, a checkpoint is saved that ``--resume`` goes on
    from. Works in the main thread only, where Python delivers signals; elsewhere it does nothing.
    """

    single = True

    def before_train(self) -> None:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            logger.warning("Ctrl-C: stopping after this step. Press it again to stop at once, without saving")
        else:
            logger.warning("%s: stopping after this step", name)
        self.trainer.request_stop(f"interrupted by {name}")

    def after_train(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
