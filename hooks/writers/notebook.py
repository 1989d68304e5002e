"""Output in notebooks: a place in a cell's output that is drawn again, and a progress bar in it.

It uses IPython's display messages, which every front end shows (Jupyter, Colab, VS Code), without widgets.
"""

import datetime
import html
import time
from collections import deque
from typing import Any

from .bar import METRICS, Bar, rate_text

__all__ = ["NotebookBar", "Place"]

_SECONDS = 30.0  # the rate is the mean over these


class Place:
    """A place in the output of the present cell, which shows the last object that it was given."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, shown: Any) -> None:
        """Show an object: one with ``_repr_html_``, or an image of IPython."""
        if self._handle is None:
            from IPython.display import display

            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)


class _Line:
    """A line with a bar, as HTML and as text."""

    def __init__(self, done: int, total: int, words: list[str]) -> None:
        self._done, self._total, self._words = done, total, words

    def __repr__(self) -> str:
        return f"{self._done / self._total:4.0%} {'  '.join(self._words)}"

    def _repr_html_(self) -> str:
        text = " &nbsp; ".join(map(html.escape, self._words))
        bar = f'<progress value="{self._done}" max="{self._total}" style="width: 12em"></progress>'
        return f'<div style="font-family: monospace; white-space: normal">{bar} {text}</div>'


class NotebookBar(Bar):
    """A progress bar in the output of a notebook's cell."""

    def __init__(self, hook: Any, period: float) -> None:
        super().__init__(hook, period)
        self._place = Place()
        self._seen: deque[tuple[float, int]] = deque()
        self._start = time.monotonic()

    def begin(self) -> None:
        self.draw()

    def draw(self) -> None:
        hook, trainer = self._hook, self._hook.trainer
        done, total, now = trainer.iter, max(trainer.max_iter, 1), time.monotonic()
        self._seen.append((now, done))
        while now - self._seen[0][0] > _SECONDS and len(self._seen) > 2:
            self._seen.popleft()
        seconds, steps = now - self._seen[0][0], done - self._seen[0][1]
        rate = steps / seconds if seconds else 0.0
        left = f"{_time((total - done) / rate)} left" if rate else ""
        values = hook.metrics()
        words = [hook.state(), f"{done}/{total}", rate_text(rate), _time(now - self._start), left]
        words += [values[name] for name in METRICS]
        self._place.show(_Line(done, total, [word for word in words if word]))


def _time(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(min(seconds, 1e9))))
