"""``ProgressBar``: a bar in a terminal or a notebook."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from ...config import ConfigError
from ..base import HOOK_REGISTRY, HookBase
from ..common.session import in_notebook
from .bar import METRICS, Bar
from .notebook import NotebookBar
from .terminal_bar import TerminalBar, is_terminal

__all__ = ["ProgressBar", "can_show_bar"]


def can_show_bar() -> bool:
    """Return whether a bar needs no further package: rich is installed, or this is a notebook."""
    return in_notebook() or importlib.util.find_spec("rich") is not None


@HOOK_REGISTRY.register()
class ProgressBar(HookBase):
    """Shows a progress bar below the log: epoch, iterations, rate, time elapsed and left, and metrics.

    The metrics are those that were last written: the loss, smoothed; the learning rate; the best value of
    CHECKPOINT.BEST.METRIC; the share of the time that steps waited for data. A narrow terminal shows fewer columns.

    Only rank 0 shows a bar, and only in a notebook or if ``sys.stdout`` is a terminal that can move the cursor. Files,
    pipes and ``TERM=dumb`` get nothing. Log lines and prints appear above the bar; in a notebook below it. A process
    shows one bar at a time.

    Steps do no work for the bar: a thread reads ``trainer.iter`` a few times a second and redraws if it changed. The
    rate is the mean over the last 30 seconds. During an evaluation the bar counts its batches. Puts nothing into the
    storage, saves nothing.

    Args:
        refresh_per_second: how often the bar is drawn at most.

    Raises:
        ConfigError: rich is not installed and this is no notebook, or ``refresh_per_second`` is not positive.
    """

    def __init__(self, refresh_per_second: float = 4.0) -> None:
        if not can_show_bar():
            raise ConfigError("a progress bar needs the package rich: pip install rich (hookline's extra 'rich')")
        if refresh_per_second <= 0:
            raise ConfigError(f"ProgressBar: refresh_per_second must be positive, not {refresh_per_second}")
        self._period = 1 / refresh_per_second
        self._bar: Bar | None = None
        self._evaluating = False
        self._batches = 0
        self._shown: dict[str, str] = {}

    def before_train(self) -> None:
        self._evaluating = False
        self._shown = {}
        self._bar = None
        if not self.trainer.comm.is_main_process() or Bar.shown is not None:
            return
        if in_notebook():
            self._bar = NotebookBar(self, self._period)
        elif is_terminal():
            self._bar = TerminalBar(self, self._period)
        if self._bar is not None:
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
            if hook.best:
                self._shown["best"] = f"best {hook.best_metric:.4g}"
        return dict.fromkeys(METRICS, "") | self._shown
