"""How far training is, for a person who watches."""

import datetime
import importlib.util
import time
from collections import deque
from typing import Any, NamedTuple

from ..config import ConfigError
from .base import HOOK_REGISTRY, HookBase
from .bottom_line import BottomLine, output_terminal

__all__ = ["ProgressBar", "rich_is_installed"]

# Seconds over which the rate is taken.
_WINDOW = 30.0
_BAR_COLUMNS = (10, 40)


def rich_is_installed() -> bool:
    """Whether the package that draws the bar is there; it is not imported."""
    return importlib.util.find_spec("rich") is not None


class _Part(NamedTuple):
    """A piece of the line. In narrow terminals those with the greatest ``rank`` are left out first."""

    rank: int
    text: str
    style: str = ""


@HOOK_REGISTRY.register()
class ProgressBar(HookBase):
    """A bar at the bottom of the terminal: iterations done, rate, time since the start and time left, epoch and loss.

    Only rank 0 shows one, and only if its ``sys.stdout`` is a terminal that can move the cursor; a file, a pipe, a
    notebook or ``TERM=dumb`` is sent nothing. Log lines and whatever is printed come above the bar. Where there is a
    bar in this process already, of another trainer, there is no second one.

    A step costs nothing: a thread looks at ``trainer.iter`` a few times a second, and draws the bar if it has changed.
    The loss is the last that a writer has read, the rate that of the last half minute, evaluations aside. The time
    left goes by all the time that this run took so far for its iterations after the first, evaluations and
    checkpoints included. During an evaluation the bar tells how many of its batches are done, on rank 0. Reads
    ``total_loss`` of the storage, puts nothing, saves nothing.

    Args:
        refresh_per_second: how often the bar is drawn at most.

    Raises:
        ConfigError: the package rich is not installed, or ``refresh_per_second`` is not positive.
    """

    def __init__(self, refresh_per_second: float = 4.0) -> None:
        if not rich_is_installed():
            raise ConfigError("a progress bar needs the package rich: pip install rich (hookline's extra 'rich')")
        if refresh_per_second <= 0:
            raise ConfigError(f"ProgressBar: refresh_per_second must be positive, not {refresh_per_second}")
        self._period = 1 / refresh_per_second
        self._line: BottomLine | None = None
        self._evaluating = False
        self._batches = 0
        self._evaluations = 0.0  # seconds they took

    def before_train(self) -> None:
        self._evaluating = False
        self._evaluations = 0.0
        # What was seen: when, and which iteration. The samples' clock, for the rate, stands still during evaluations.
        self._samples: deque[tuple[float, int]] = deque()
        self._first: tuple[float, int] | None = None
        self._rate = 0.0
        self._began = time.monotonic()
        self._line = None
        if not self.trainer.comm.is_main_process() or output_terminal() is None:
            return
        from rich.console import Console

        self._console = Console(file=output_terminal())
        if not self._console.is_interactive or self._console.legacy_windows:
            return
        self._line = BottomLine(self._render, self._moment, self._period)
        self._line.begin()

    def before_eval(self) -> None:
        self._evaluation_began = time.monotonic()
        self._batches, self._evaluating = 0, True

    def after_eval_step(self, batch: Any, outputs: Any) -> None:
        self._batches += 1

    def on_eval_end(self) -> None:
        if self._evaluating:
            self._evaluations += time.monotonic() - self._evaluation_began
            self._evaluating = False

    def after_run(self) -> None:
        if self._line is not None:
            self._line.end()
            self._line = None

    def _moment(self) -> tuple[int, bool, int]:
        return self.trainer.iter, self._evaluating, self._batches

    # ------------------------------------------------------------------ what it looks like

    def _render(self, columns: int) -> str:
        """The bar as text for a terminal, at most ``columns`` wide."""
        from rich.progress_bar import ProgressBar as Bar
        from rich.segment import Segment, Segments
        from rich.text import Text

        done, total = self.trainer.iter, max(self.trainer.max_iter, 1)
        console = self._console
        console.width = columns
        segments: list[Segment] = []
        for part in _fit(self._parts(time.monotonic(), done, total), columns):
            drawn = Bar(total, done) if part.rank == _BAR.rank else Text(part.text, part.style)
            if segments:
                segments.append(Segment("  "))
            lines = console.render_lines(drawn, console.options.update_width(len(part.text)))
            # Without colours there is nothing of a bar at 0%.
            segments += lines[0] if lines else [Segment(" " * len(part.text))]
        with console.capture() as captured:
            console.print(Segments(segments), end="", crop=False)
        return captured.get()

    def _parts(self, now: float, done: int, total: int) -> list[_Part]:
        left = self._seconds_left(now, done, total)
        loss = self.trainer.storage.peek("total_loss")
        evaluating = _Part(0, f"evaluating, batch {self._batches}", "bold")
        parts = [
            evaluating if self._evaluating else _Part(6, self._epoch(total)),
            _BAR,
            _Part(1, f"{min(100 * done // total, 100)}%", "progress.percentage"),
            _Part(2, f"{done}/{total}", "progress.download"),
            _Part(5, _rate(self._rate), "progress.data.speed"),
            _Part(8, _clock(now - self._began), "progress.elapsed"),
            _Part(3, "" if left is None else f"{_clock(left)} left", "progress.remaining"),
            _Part(7, "" if loss is None else f"loss {loss:.4g}"),
        ]
        return [part for part in parts if part.text]

    def _epoch(self, total: int) -> str:
        epoch, length = self.trainer.epoch, self.trainer.iters_per_epoch
        if not length:
            return f"epoch {epoch + 1}" if epoch else ""
        epochs = -(-total // length)
        return f"epoch {min(epoch + 1, epochs)}/{epochs}"

    def _seconds_left(self, now: float, done: int, total: int) -> float | None:
        """Seconds until the end, if that can be said; takes note of what the present rate is."""
        samples = self._samples
        if done > self.trainer.start_iter and not self._evaluating:
            samples.append((now - self._evaluations, done))
            self._first = self._first or (now, done)
            while len(samples) > 2 and samples[-1][0] - samples[0][0] > _WINDOW:
                samples.popleft()
            seconds, steps = samples[-1][0] - samples[0][0], samples[-1][1] - samples[0][1]
            if seconds > 0 and steps > 0:
                self._rate = steps / seconds
        if done >= total:
            return 0.0
        if self._first is None or done <= self._first[1]:
            return None
        return (total - done) * (now - self._first[0]) / (done - self._first[1])


# Its text stands for the columns that the bar takes.
_BAR = _Part(4, "━" * _BAR_COLUMNS[0])


def _fit(parts: list[_Part], columns: int) -> list[_Part]:
    """The parts there is room for; the bar grows as far as it may."""

    def width() -> int:
        return sum(len(part.text) + 2 for part in parts) - 2

    while width() > columns and len(parts) > 1:
        parts.remove(max(parts, key=lambda part: part.rank))
    least, most = _BAR_COLUMNS
    bar = "━" * min(least + columns - width(), most)
    return [part._replace(text=bar if part is _BAR else part.text[:columns]) for part in parts]


def _rate(rate: float) -> str:
    if not rate:
        return ""
    number, unit = (rate, "it/s") if rate >= 1 else (1 / rate, "s/it")
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=int(seconds)))
