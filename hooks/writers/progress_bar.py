"""A progress bar for the terminal, drawn by rich."""

import contextlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from ...config import ConfigError
from ..base import HOOK_REGISTRY, HookBase

__all__ = ["ProgressBar", "bar_is_shown", "rich_is_installed"]

# Columns of the bar, as shown. When the terminal is too narrow the first one of _DROPPED goes first.
_COLUMNS = ("state", "bar", "percent", "count", "rate", "elapsed", "left", "loss", "lr", "best", "data")
_DROPPED = ("elapsed", "rate", "state", "percent", "data", "lr", "best", "bar", "loss", "left", "count")
_METRICS = ("loss", "lr", "best", "data")


def bar_is_shown() -> bool:
    """Return whether this process shows a progress bar."""
    return _Bar.shown is not None


def rich_is_installed() -> bool:
    """Return whether rich is installed, without importing it."""
    return importlib.util.find_spec("rich") is not None


@HOOK_REGISTRY.register()
class ProgressBar(HookBase):
    """Shows a progress bar below the log: epoch, iterations, rate, time elapsed and left, and metrics.

    The metrics are those that were last written: the loss, smoothed; the learning rate; the best value of
    CHECKPOINT.BEST.METRIC; the share of the time that steps waited for data. A narrow terminal shows fewer columns.

    Only rank 0 shows a bar, and only if ``sys.stdout`` is a terminal that can move the cursor. Files, pipes, notebooks
    and ``TERM=dumb`` get nothing. Log lines and prints appear above the bar. A process shows one bar at a time.

    Steps do no work for the bar: a thread reads ``trainer.iter`` a few times a second and redraws if it changed. The
    rate is the mean over the last 30 seconds. During an evaluation the bar counts its batches. Puts nothing into the
    storage, saves nothing.

    Args:
        refresh_per_second: how often the bar is drawn at most.

    Raises:
        ConfigError: rich is not installed, or ``refresh_per_second`` is not positive.
    """

    def __init__(self, refresh_per_second: float = 4.0) -> None:
        if not rich_is_installed():
            raise ConfigError("a progress bar needs the package rich: pip install rich (hookline's extra 'rich')")
        if refresh_per_second <= 0:
            raise ConfigError(f"ProgressBar: refresh_per_second must be positive, not {refresh_per_second}")
        self._period = 1 / refresh_per_second
        self._bar: _Bar | None = None
        self._evaluating = False
        self._batches = 0
        self._shown: dict[str, str] = {}

    def before_train(self) -> None:
        self._evaluating = False
        self._shown = {}
        self._bar = None
        if self.trainer.comm.is_main_process() and _Bar.shown is None and _is_terminal():
            self._bar = _Bar(self, self._period)
            self._bar.start()

    def before_eval(self) -> None:
        self._batches, self._evaluating = 0, True

    def after_eval_step(self, batch: Any, outputs: Any) -> None:
        self._batches += 1

    def on_eval_end(self) -> None:
        self._evaluating = False

    def after_run(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def progress(self) -> tuple[int, bool, int]:
        """Return what the bar shows: the iteration, whether the run evaluates, and the batches evaluated."""
        return self.trainer.iter, self._evaluating, self._batches

    def state(self) -> str:
        """Return what the run is doing: the epoch, or the batch of an evaluation."""
        trainer = self.trainer
        if self._evaluating:
            return f"evaluating, batch {self._batches}"
        if not trainer.iters_per_epoch:
            return f"epoch {trainer.epoch + 1}" if trainer.epoch else ""
        epochs = -(-max(trainer.max_iter, 1) // trainer.iters_per_epoch)
        return f"epoch {min(trainer.epoch + 1, epochs)}/{epochs}"

    def after_write(self, metrics: Mapping[str, float]) -> None:
        loss = metrics.get("total_loss", metrics.get("loss"))
        if loss is not None:
            self._shown["loss"] = f"loss {loss:.4g}"
        if "lr" in metrics:
            self._shown["lr"] = f"lr {metrics['lr']:.3g}"
        if metrics.get("time") and "data_time" in metrics:
            self._shown["data"] = f"data {min(metrics['data_time'] / metrics['time'], 1):.0%}"

    def metrics(self) -> dict[str, str]:
        """Return what the bar shows of the metrics that were last written, by column."""
        for hook in self.trainer.find_hooks("BestCheckpointer"):
            if hook.best_metric is not None:
                self._shown["best"] = f"best {hook.best_metric:.4g}"
        return dict.fromkeys(_METRICS, "") | self._shown


def _is_terminal() -> bool:
    """Return whether ``sys.stdout`` is a terminal whose cursor moves, regardless of variables such as FORCE_COLOR."""
    try:
        if not os.isatty(sys.stdout.fileno()):
            return False
    except (AttributeError, OSError, ValueError):  # no stream, no file, or closed
        return False
    from rich.console import Console

    console = Console()
    return console.is_interactive and not console.legacy_windows


class _Bar:
    """A rich ``Progress`` that follows a :class:`ProgressBar`, and a thread that redraws it.

    The thread replaces rich's own. It draws only after progress, so a debugger's prompt stays readable.
    """

    shown: "_Bar | None" = None

    def __init__(self, hook: ProgressBar, period: float) -> None:
        from rich.console import Console

        self._hook = hook
        self._period = period
        # Printed lines are not wrapped: terminals do that, and copied text keeps its lines.
        self._console = Console(soft_wrap=True)
        self._progress = _progress(self._console)
        trainer = hook.trainer
        self._task = self._progress.add_task(
            "", total=max(trainer.max_iter, 1), completed=trainer.iter, state="", **dict.fromkeys(_METRICS, "")
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="hookline-progress-bar", daemon=True)
        self._handlers: list[tuple[Any, Any]] = []

    def start(self) -> None:
        _Bar.shown = self
        streams = sys.stdout, sys.stderr
        self._update()
        self._progress.start()
        self._console.show_cursor(True)  # a killed process must not leave it hidden
        _redirect_handlers(dict(zip(streams, (sys.stdout, sys.stderr), strict=True)), self._handlers)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed
            self._update()
            self._progress.stop()
        for handler, stream in self._handlers:
            handler.stream = stream
        _Bar.shown = None

    def _redraw(self) -> None:
        drawn = None
        with contextlib.suppress(OSError, ValueError, ReferenceError):  # terminal closed, or trainer gone
            while not self._stopping.wait(self._period):
                now = self._hook.progress()
                if now != drawn:
                    drawn = now
                    self._update()
                    self._progress.refresh()

    def _update(self) -> None:
        hook, trainer = self._hook, self._hook.trainer
        # rich reads the width of the standard streams, which may be another terminal. 0 means that it is unknown.
        self._console.width = os.get_terminal_size(self._console.file.fileno()).columns or 80
        self._progress.update(
            self._task, total=max(trainer.max_iter, 1), completed=trainer.iter, state=hook.state(), **hook.metrics()
        )

    @classmethod
    def forget(cls) -> None:
        """In a forked process: print directly, since the parent's locks may be held and only the parent draws."""
        if cls.shown is not None:
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                setattr(sys, name, getattr(stream, "rich_proxied_file", stream))
            for handler, stream in cls.shown._handlers:
                handler.stream = stream
            cls.shown = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Bar.forget)


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
            return Text(_rate(task.finished_speed or task.speed or 0.0), style="progress.data.speed")

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
                *(TextColumn(f"{{task.fields[{name}]}}") for name in _METRICS),
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


def _rate(rate: float) -> str:
    if not rate:
        return ""
    number, unit = (rate, "it/s") if rate >= 1 else (1 / rate, "s/it")
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
