"""Metrics as lines of the log."""

import datetime
import logging
import time

import torch

from ..event_storage import EventStorage, get_event_storage
from ..watching.timing import format_seconds
from .base import WRITER_REGISTRY, EventWriter

__all__ = ["CommonMetricPrinter"]

_LONGEST_ETA = 10**10  # seconds; a timedelta cannot hold much more


@WRITER_REGISTRY.register()
class CommonMetricPrinter(EventWriter):
    """Logs a line with ETA, iteration, losses, time and data time per step, learning rate and GPU memory.

    Metrics with ``[metric]`` in their name are logged, too. Beside a progress bar, only ``log.txt`` has these lines.

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
        length = "" if self._max_iter is None else f"/{self._max_iter}"
        parts = [f"eta: {eta}"] if eta else []
        parts.append(f"iter: {iteration}{length}")
        parts += [f"{name}: {value:.4g}" for name, value in losses.items()]
        parts += [f"{name}: {metrics[name][0]:.4g}" for name in metrics if "[metric]" in name and name not in losses]
        parts += [f"{name}: {format_seconds(metrics[name][0])}" for name in ("time", "data_time") if name in metrics]
        if "lr" in metrics:
            parts.append(f"lr: {metrics['lr'][0]:.5g}")
        if torch.cuda.is_initialized():
            parts.append(f"max_mem: {torch.cuda.max_memory_allocated() / 2**20:.0f}M")
        self._last_write = (iteration, time.perf_counter())
        self.logger.info("  ".join(parts), extra={"is_on_bar": True})

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
