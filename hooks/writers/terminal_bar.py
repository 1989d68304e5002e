"""A progress bar in a terminal, drawn by rich."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from .bar import METRICS, Bar, rate_text

__all__ = ["TerminalBar", "is_terminal"]

# Columns of the bar, as shown. When the terminal is too narrow the first one of _DROPPED goes first.
_COLUMNS = ("state", "bar", "percent", "count", "rate", "elapsed", "left", *METRICS)
_DROPPED = ("elapsed", "rate", "state", "percent", "data", "lr", "best", "bar", "loss", "left", "count")


def is_terminal() -> bool:
    """Return whether ``sys.stdout`` is a terminal whose cursor moves, regardless of variables such as FORCE_COLOR."""
    try:
        if not os.isatty(sys.stdout.fileno()):
            return False
    except (AttributeError, OSError, ValueError):  # no stream, no file, or closed
        return False
    from rich.console import Console

    console = Console()
    return console.is_interactive and not console.legacy_windows


class TerminalBar(Bar):
    """A rich ``Progress``. It draws only after progress, so a debugger's prompt stays readable."""

    def __init__(self, hook: Any, period: float) -> None:
        from rich.console import Console

        super().__init__(hook, period)
        # Printed lines are not wrapped: terminals do that, and copied text keeps its lines.
        self._console = Console(soft_wrap=True)
        self._progress = _progress(self._console)
        trainer = hook.trainer
        self._task = self._progress.add_task(
            "", total=max(trainer.max_iter, 1), completed=trainer.iter, state="", **dict.fromkeys(METRICS, "")
        )
        self._handlers: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        streams = sys.stdout, sys.stderr
        self._update()
        self._progress.start()
        self._console.show_cursor(True)  # a killed process must not leave it hidden
        _redirect_handlers(dict(zip(streams, (sys.stdout, sys.stderr), strict=True)), self._handlers)

    def end(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed
            self._update()
            self._progress.stop()
        for handler, stream in self._handlers:
            handler.stream = stream

    def draw(self) -> None:
        self._update()
        self._progress.refresh()

    def _update(self) -> None:
        hook, trainer = self._hook, self._hook.trainer
        # rich reads the width of the standard streams, which may be another terminal. 0 means that it is unknown.
        self._console.width = os.get_terminal_size(self._console.file.fileno()).columns or 80
        self._progress.update(
            self._task, total=max(trainer.max_iter, 1), completed=trainer.iter, state=hook.state(), **hook.metrics()
        )

    def leave_to_parent(self) -> None:
        """Print directly, since the parent's locks may be held."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            setattr(sys, name, getattr(stream, "rich_proxied_file", stream))
        for handler, stream in self._handlers:
            handler.stream = stream


def _redirect_handlers(streams: dict[Any, Any], moved: list[tuple[Any, Any]]) -> None:
    """Let logging handlers that hold one of ``streams`` write to its replacement, and note them in ``moved``."""
    for logger in (logging.root, *logging.root.manager.loggerDict.copy().values()):
        for handler in getattr(logger, "handlers", ()):  # some entries are placeholders
            stream = vars(handler).get("stream")
            for before, after in streams.items():
                if stream is before and before is not after:
                    moved.append((handler, before))
                    handler.stream = after


def _progress(console: Any) -> Any:
    """Return a rich ``Progress`` that leaves out columns for which the terminal has no room."""
    from rich.console import RenderableType
    from rich.measure import Measurement
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(rate_text(task.finished_speed or task.speed or 0.0), style="progress.data.speed")

    class Left(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) + " left"

    columns = dict(
        zip(
            _COLUMNS,
            (
                TextColumn("{task.fields[state]}"),
                BarColumn(),
                TaskProgressColumn(),
                MofNCompleteColumn(),
                Rate(),
                TimeElapsedColumn(),
                Left(),
                *(TextColumn(f"{{task.fields[{name}]}}") for name in METRICS),
            ),
            strict=True,
        )
    )

    class Bar(Progress):
        def get_renderables(self) -> Iterator[RenderableType]:
            columns["bar"].bar_width = 20 if console.width >= 100 else 10  # type: ignore[attr-defined]
            dropped = {name for task in self.tasks for name, value in task.fields.items() if not value}
            for name in ("", *_DROPPED):
                dropped.add(name)
                self.columns = tuple(column for key, column in columns.items() if key not in dropped)
                table = self.make_tasks_table(self.tasks)
                # Three columns stay free: room for the ^C that a user types.
                if Measurement.get(console, console.options, table).maximum <= console.width - 3:
                    break
            yield table

    return Bar(console=console, auto_refresh=False)
