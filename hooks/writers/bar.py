"""What all progress bars share: what they show, and the thread that draws them."""

import contextlib
import os
import threading
from typing import Any

__all__ = ["METRICS", "Bar", "bar_is_shown", "rate_text"]

METRICS = ("loss", "lr", "best", "data")
"""What a bar shows of the metrics, in this order."""


def bar_is_shown() -> bool:
    """Return whether this process shows a progress bar."""
    return Bar.shown is not None


def rate_text(rate: float) -> str:
    """Return a number of iterations per second as text; empty if it is 0."""
    if not rate:
        return ""
    number, unit = (rate, "it/s") if rate >= 1 else (1 / rate, "s/it")
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


class Bar:
    """Follows a :class:`~hookline.hooks.ProgressBar` with a thread that draws it after progress.

    Args:
        hook: what it shows.
        period: seconds between two drawings.
    """

    shown: "Bar | None" = None

    def __init__(self, hook: Any, period: float) -> None:
        self._hook = hook
        self._period = period
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="hookline-progress-bar", daemon=True)

    def start(self) -> None:
        """Show the bar."""
        Bar.shown = self
        self.begin()
        self._thread.start()

    def stop(self) -> None:
        """Draw the bar a last time, and leave it on the screen."""
        self._stopping.set()
        self._thread.join()
        self.end()
        Bar.shown = None

    def _redraw(self) -> None:
        drawn = None
        with contextlib.suppress(OSError, ValueError, ReferenceError):  # terminal closed, or trainer gone
            while not self._stopping.wait(self._period):
                now = self._hook.progress()
                if now != drawn:
                    drawn = now
                    self.draw()

    def begin(self) -> None:
        """Draw the bar for the first time."""
        raise NotImplementedError

    def draw(self) -> None:
        """Draw the present progress."""
        raise NotImplementedError

    def end(self) -> None:
        """Draw the bar for the last time."""
        self.draw()

    def leave_to_parent(self) -> None:
        """Undo in a forked process what would disturb the bar of its parent."""

    @classmethod
    def forget(cls) -> None:
        """In a forked process: only the parent draws."""
        if Bar.shown is not None:
            Bar.shown.leave_to_parent()
            Bar.shown = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Bar.forget)
