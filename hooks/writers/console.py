"""Metrics as lines of the log."""

import datetime
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..storage.event_storage import EventStorage, get_event_storage
from ..watching.timing import format_seconds
from .base import WRITER_REGISTRY, EventWriter

__all__ = ["CommonMetricPrinter", "Part", "shortened"]

_LONGEST_ETA = 10**10  # seconds; a timedelta cannot hold much more


class Part(NamedTuple):
    """A part of a line of metrics.

    Attributes:
        text: such as ``"lr: 0.1"``.
        rank: if the terminal has no room, the part with the least rank is left out first.
        on_bar: whether the progress bar shows it, or it has not changed.
    """

    text: str
    rank: int
    on_bar: bool


def shortened(parts: Sequence[Part], width: int, with_bar: bool) -> str:
    """Return a line of metrics for a terminal; empty if the bar shows all of it.

    Args:
        parts: its parts.
        width: columns of the terminal; 0: unlimited.
        with_bar: whether a progress bar is shown.
    """
    most = max(part.rank for part in parts)
    kept = [part for part in parts if part.rank == most or not (with_bar and part.on_bar)]
    if with_bar and len(kept) == 1:
        return ""
    while width and len(kept) > 1 and len("  ".join(part.text for part in kept)) > width:
        kept.remove(min(kept, key=lambda part: part.rank))
    return "  ".join(part.text for part in kept)


@WRITER_REGISTRY.register()
class CommonMetricPrinter(EventWriter):
    """Logs a line with ETA, iteration, losses, time and data time per step, learning rate and GPU memory.

    Metrics with ``[metric]`` in their name are logged, too. A terminal shows as much as fits into one line, the most
    important first; beside a progress bar, only what the bar does not show. ``log.txt`` has all of it.

    Args:
        max_iter: number of iterations of the run, for the ETA; None: no ETA.
        window_size: see :class:`RowWriter`.
    """

    def __init__(self, max_iter: int | None = None, window_size: int = 20) -> None:
        self.logger = logging.getLogger(__name__)
        self._max_iter = max_iter
        self._window_size = window_size
        self._last_write: tuple[int, float] | None = None  # iteration and time of the last line
        self._start_iter = 0

    _memory = ""  # as last logged

    def resume(self, start_iter: int) -> None:
        self._last_write = None
        self._start_iter = start_iter

    def write(self) -> None:
        storage = get_event_storage()
        metrics = storage.latest_with_smoothing_hint(self._window_size)
        smoothed = storage.smoothing_hints()
        # The last iteration with smoothed metrics: after the last step storage.iter is one more.
        iteration = max((it for name, (_, it) in metrics.items() if smoothed[name]), default=storage.iter)
        if (
            iteration == self._max_iter
            or iteration < self._start_iter
            or (self._last_write is not None and iteration <= self._last_write[0])
        ):
            return  # no progress to report
        eta = self._get_eta(storage)
        losses = {name: value for name, (value, _) in metrics.items() if "loss" in name and smoothed[name]}
        if len(losses) == 2:  # the total of a single loss is the same number
            losses.pop("total_loss", None)
        parts = [Part(f"eta: {eta}" if eta else "", 4, True), Part(self._iteration(iteration), 9, True)]
        for name, value in losses.items():
            is_main = len(losses) == 1 or name == "total_loss"
            parts.append(Part(f"{name}: {value:.4g}", 8 if is_main else 6, is_main))
        for name, (value, _) in metrics.items():
            if "[metric]" in name and name not in losses:
                parts.append(Part(f"{name}: {value:.4g}", 5, False))
        for rank, name in ((3, "time"), (2, "data_time")):
            if name in metrics:
                parts.append(Part(f"{name}: {format_seconds(metrics[name][0])}", rank, True))
        if "lr" in metrics:
            parts.append(Part(f"lr: {metrics['lr'][0]:.5g}", 7, True))
        if torch.cuda.is_initialized():
            memory = f"max_mem: {torch.cuda.max_memory_allocated() / 2**20:.0f}M"
            parts.append(Part(memory, 1, memory == self._memory))
            self._memory = memory
        self._last_write = (iteration, time.perf_counter())
        parts = [part for part in parts if part.text]
        # The console shortens the line: see engine/setup/logger.py.
        self.logger.info("  ".join(part.text for part in parts), extra={"parts": parts})

    def _iteration(self, iteration: int) -> str:
        return f"iter: {iteration}" if self._max_iter is None else f"iter: {iteration}/{self._max_iter}"

    def _get_eta(self, storage: EventStorage) -> str:
        """Return the time left, from the median step time or, without one, from the time since the last line.

        Empty if it is not known. Printers of detectron2's projects call this method.
        """
        if self._max_iter is None:
            return ""
        metrics = storage.latest_with_smoothing_hint(self._window_size)
        # After a stopped run's last step storage.iter is one more than the iteration that the row is of.
        iteration = metrics["time"][1] if "time" in metrics else storage.iter
        left = max(self._max_iter - iteration - 1, 0)
        if "time" in metrics:
            step = metrics["time"][0]
            storage.put_scalar("eta_seconds", step * left, smoothing_hint=False, cur_iter=iteration)
        elif self._last_write is not None and storage.iter > self._last_write[0]:
            step = (time.perf_counter() - self._last_write[1]) / (storage.iter - self._last_write[0])
        else:
            return ""
        return str(datetime.timedelta(seconds=min(int(step * left), _LONGEST_ETA)))
