"""What a terminal or a notebook shows of a run under way: a progress bar, and a plot of the metrics."""

import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from ...config import ConfigError
from ..base import HOOK_REGISTRY, HookBase
from ..control.interruption import in_notebook
from ..history_buffer import HistoryBuffer

__all__ = ["LivePlot", "ProgressBar", "bar_is_shown"]

_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left, {rate_fmt}{postfix}]"


@HOOK_REGISTRY.register()
class ProgressBar(HookBase):
    """Shows a tqdm bar below the log: epoch, iterations, time left, rate, and metrics.

    The metrics are those that were last written: the loss, smoothed; the learning rate; the best value of
    CHECKPOINT.BEST.METRIC; the share of the time that steps waited for data. A narrow terminal cuts the line.

    Only rank 0 shows a bar, and only in a notebook or if ``sys.stdout`` is a terminal that can move the cursor. Files,
    pipes and ``TERM=dumb`` get nothing. Log lines and prints appear above the bar. A process shows one bar at a time.

    Steps do no work for the bar: a thread reads ``trainer.iter`` a few times a second and redraws if it changed, so a
    debugger's prompt stays readable. During an evaluation the bar counts its batches. Puts nothing into the storage,
    saves nothing.

    Args:
        refresh_per_second: how often the bar is drawn at most.

    Raises:
        ConfigError: ``refresh_per_second`` is not positive.
    """

    _shown: "ProgressBar | None" = None  # of this process
    _batches: int | None = None  # of the evaluation under way

    def __init__(self, refresh_per_second: float = 4.0) -> None:
        if refresh_per_second <= 0:
            raise ConfigError(f"ProgressBar: refresh_per_second must be positive, not {refresh_per_second}")
        self._period = 1 / refresh_per_second

    def before_train(self) -> None:
        trainer = self.trainer
        self._batches, self._metrics = None, dict[str, str]()
        if not trainer.comm.is_main_process() or bar_is_shown() or not (in_notebook() or _is_terminal()):
            return
        from tqdm.auto import tqdm

        ProgressBar._shown = self
        self._streams = sys.stdout, sys.stderr
        self._bar = tqdm(
            total=max(trainer.max_iter, 1),
            initial=trainer.iter,
            file=sys.stdout,
            bar_format=_FORMAT,
            dynamic_ncols=True,
            mininterval=0,
            miniters=0,
        )
        sys.stdout, sys.stderr = (_AboveBar(stream, self._bar) for stream in self._streams)
        above = dict(zip(self._streams, (sys.stdout, sys.stderr), strict=True))
        loggers: list[Any] = [logging.root, *logging.root.manager.loggerDict.copy().values()]
        handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
        self._handlers = [(one, one.stream) for one in handlers if vars(one).get("stream") in above]
        for handler, stream in self._handlers:
            handler.stream = above[stream]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="hookline-progress-bar", daemon=True)
        self._thread.start()

    def before_eval(self) -> None:
        self._batches = 0

    def after_eval_step(self, batch: Any, outputs: Any) -> None:
        self._batches = (self._batches or 0) + 1

    def on_eval_end(self) -> None:
        self._batches = None

    def after_write(self, metrics: Mapping[str, float]) -> None:
        loss = metrics.get("total_loss", metrics.get("loss"))
        if loss is not None:
            self._metrics["loss"] = f"{loss:.4g}"
        if "lr" in metrics:
            self._metrics["lr"] = f"{metrics['lr']:.3g}"
        if metrics.get("time") and "data_time" in metrics:
            self._metrics["data"] = f"{min(metrics['data_time'] / metrics['time'], 1):.0%}"

    def after_run(self) -> None:
        if ProgressBar._shown is not self:
            return
        self._stopping.set()
        self._thread.join()
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed
            sys.stdout.flush()
            sys.stderr.flush()
            self._draw()
            self._bar.close()
        _restore_streams()

    def _redraw(self) -> None:
        drawn = None
        with contextlib.suppress(OSError, ValueError, ReferenceError):  # terminal closed, or trainer gone
            while not self._stopping.wait(self._period):
                now = self.trainer.iter, self._batches
                if now != drawn:
                    drawn = now
                    self._draw()

    def _draw(self) -> None:
        trainer, bar = self.trainer, self._bar
        bar.total = max(trainer.max_iter, 1)
        if self._batches is not None:
            bar.set_description(f"evaluating, batch {self._batches}", refresh=False)
        elif trainer.iters_per_epoch:
            epochs = -(-bar.total // trainer.iters_per_epoch)
            bar.set_description(f"epoch {min(trainer.epoch + 1, epochs)}/{epochs}", refresh=False)
        else:
            bar.set_description(f"epoch {trainer.epoch + 1}" if trainer.epoch else "", refresh=False)
        for hook in trainer.find_hooks("BestCheckpointer"):
            if hook.best:
                self._metrics["best"] = f"{hook.best_metric:.4g}"
        shown = (name for name in ("loss", "lr", "best", "data") if name in self._metrics)
        bar.set_postfix_str(", ".join(f"{name} {self._metrics[name]}" for name in shown), refresh=False)
        bar.update(trainer.iter - bar.n)


class _AboveBar:
    """A stream whose lines appear above a bar, each when it is complete or flushed (a debugger's prompt)."""

    def __init__(self, stream: Any, bar: Any) -> None:
        self._stream, self._bar, self._line = stream, bar, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        lines, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            with self._bar.external_write_mode(file=self._bar.fp):
                self._stream.write(f"{lines}\n")
        return len(text)

    def flush(self) -> None:
        if self._line:
            self.write("\n")
        self._stream.flush()


def bar_is_shown() -> bool:
    """Return whether this process shows a progress bar."""
    return ProgressBar._shown is not None


def _is_terminal() -> bool:
    """Return whether ``sys.stdout`` is a terminal of known width whose cursor moves."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns > 0 and os.environ.get("TERM") != "dumb"
    except (AttributeError, OSError, ValueError):  # no stream, no file, or closed
        return False


def _restore_streams() -> None:
    """Take the bar off the standard streams. In a forked process too: only the parent draws, and may hold the lock."""
    if (bar := ProgressBar._shown) is not None:
        sys.stdout, sys.stderr = bar._streams
        for handler, stream in bar._handlers:
            handler.stream = stream
        ProgressBar._shown = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_streams)


@HOOK_REGISTRY.register()
class LivePlot(HookBase):
    """Draws losses and metrics below the cell of a notebook, when metrics are written and at the end.

    Drawing takes about 0.1 s. Outside of a notebook it does nothing.

    Args:
        metrics: names or patterns, with a panel each. A metric is in the first that matches. Default: losses, of
            training and of test sets; other results of evaluations.
        seconds: least time between two drawings.

    Raises:
        ConfigError: matplotlib is not installed.
    """

    def __init__(self, metrics: Sequence[str] = ("*loss*", "*/*"), seconds: float = 2.0) -> None:
        if find_spec("matplotlib") is None:
            raise ConfigError("LivePlot needs the package matplotlib: pip install matplotlib (hookline's extra 'plot')")
        if isinstance(metrics, str):
            raise ConfigError(f"LivePlot: metrics is a list of names or patterns, not {metrics!r}")
        self._patterns = metrics
        self._seconds = seconds

    def before_train(self) -> None:
        self._active = self.trainer.comm.is_main_process() and in_notebook()
        self._place: Any = None  # IPython's handle of what the cell shows
        self._next = time.monotonic() + self._seconds

    def after_write(self, metrics: Any) -> None:
        if self._active and time.monotonic() >= self._next:
            self._draw()

    def after_run(self) -> None:
        if self._active:
            self._draw()

    def _draw(self) -> None:
        figure = self._figure(self.trainer.storage.histories())
        if figure is None:
            return
        from IPython.display import Image, display

        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=100)
        if self._place is None:
            self._place = display(Image(file.getvalue()), display_id=True)
        else:
            self._place.update(Image(file.getvalue()))
        self._next = time.monotonic() + self._seconds

    def _figure(self, histories: Mapping[str, HistoryBuffer]) -> Any:
        panels: dict[str, list[str]] = {}
        for name in histories:
            if name == "total_loss" and "loss" in histories:  # usually the same number
                continue
            if pattern := next((one for one in self._patterns if fnmatchcase(name, one)), ""):
                panels.setdefault(pattern, []).append(name)
        if not panels:
            return None
        from matplotlib.figure import Figure  # not pyplot, which keeps every figure

        figure = Figure(figsize=(5.0 * len(panels), 3.2), layout="constrained")
        for axes, (title, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            for name in names:
                axes.plot(*histories[name].arrays(), label=name, marker="." if len(histories[name]) < 50 else None)
            axes.set(title=title, xlabel="iteration")
            axes.legend(fontsize="small")
            axes.grid(alpha=0.3)
        return figure
