"""Base classes of writers, and the writer of the log's lines."""

import datetime
import logging
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from ...config import Registry
from ..builtin.timing import format_seconds
from ..event_storage import EventStorage, Row, get_event_storage, has_event_storage

EndOfRun = Literal["completed", "stopped", "interrupted", "failed"]
"""How a run ended. "stopped": on purpose, as by early stopping. "interrupted": it can be resumed."""


class EventWriter:
    """Writes metrics of the active :class:`~hookline.hooks.EventStorage` to a file or elsewhere."""

    def write(self) -> None:
        """Write what is new in ``get_event_storage()``."""
        raise NotImplementedError

    def resume(self, start_iter: int) -> None:
        """Remove what an earlier run wrote for iterations from ``start_iter`` on.

        Called by :class:`PeriodicWriter` before the first write, usually when the first step is done.
        """

    def sync(self) -> None:
        """Sync what was written to the disk. Called before a checkpoint is saved."""

    def close(self) -> None:
        """Close files. A later :meth:`write` reopens what it needs."""

    def finish(self, how: EndOfRun) -> None:
        """The run has ended. Called by :class:`PeriodicWriter` after :meth:`close` and after the last checkpoint."""


WRITER_REGISTRY: Registry = Registry("WRITER", EventWriter)
"""Writers for ``LOG.WRITERS``. Each gets ``cfg``, ``output_dir``, ``max_iter``, ``window_size``, if it has them as
arguments."""


class RowWriter(EventWriter):
    """A writer of rows. A subclass defines :meth:`write_rows`, which gets every metric exactly once.

    Args:
        window_size: iterations over which smoothed metrics are reported as their median, or as their mean if it is a
            :class:`~hookline.hooks.history_buffer.MeanWindow`.

    Attributes:
        path: the file or folder that it writes; empty if it writes elsewhere.
    """

    path: str = ""
    takes_media = False
    """Whether it also writes images, histograms and texts."""
    # On the class, for subclasses with a write() of their own that do not call __init__, as projects of detectron2.
    _window_size = 20
    _seen = 0  # see EventStorage.rows()
    _last_write = -1
    _resumed = False  # a state was loaded, which the next run continues
    _first = 0  # first iteration whose rows come from this run
    _storage: "weakref.ref[EventStorage] | None" = None  # whose rows are written
    _waiting: Sequence[Any] = ()  # collected and not written

    def __init__(self, window_size: int = 20) -> None:
        self._window_size = window_size

    def resume(self, start_iter: int) -> None:
        self._waiting = ()  # of a run that failed; this one writes its own
        if self._resumed:
            # The last run may have evaluated after its last step, an iteration that this run writes again. And a
            # checkpoint may hold earlier metrics that were not yet written.
            self._last_write = min(self._last_write, start_iter - 1)
            self._first = self._last_write + 1
        else:
            self._first = start_iter
        self._begin(get_event_storage() if has_event_storage() else None)

    def _begin(self, storage: EventStorage | None) -> None:
        """Write rows of ``storage`` from now on: what was put since it was loaded, or since the loaded state."""
        if not self._resumed:
            self._seen, self._last_write = storage.loaded if storage else 0, -1
        self._resumed, self._storage = False, weakref.ref(storage) if storage else None

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the storage, and the last iteration written."""
        return {"seen": self._seen, "last_write": self._last_write}

    def reset(self) -> None:
        """Forget a loaded state: the next run begins anew."""
        self._resumed = False

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load :meth:`state_dict`. The next run's storage must hold the state of the earlier one."""
        self._seen, self._last_write = state_dict["seen"], state_dict["last_write"]
        self._resumed = True

    def use_folder(self, folder: str) -> None:
        """Write into the folder of a run, if no path was given. :class:`PeriodicWriter` calls it before training."""

    def write(self) -> None:
        storage = get_event_storage()
        self.collect(storage)
        self.deliver()
        if self.takes_media:
            storage.clear_media()

    def collect(self, storage: EventStorage) -> None:
        """Take what is new in ``storage``, for :meth:`deliver`."""
        self._waiting = [*self._waiting, *self._new_rows(storage)]

    def deliver(self) -> None:
        """Write what was collected. After an OSError it waits for the next call."""
        rows, self._waiting = self._waiting, ()
        try:
            if rows:
                self.write_rows(rows)
        except OSError:
            self._waiting = rows
            raise

    def _new_rows(self, storage: EventStorage) -> list[Row]:
        if self._storage is None or self._storage() is not storage:  # written to without a PeriodicWriter
            self._begin(storage)
        rows, self._seen = storage.rows(self._window_size, self._seen, self._last_write + 1)
        if rows:
            self._last_write = rows[-1][0]
        return rows

    def write_rows(self, rows: Sequence[Row]) -> None:
        """Write rows in ascending order of iterations, all greater than those of earlier calls.

        Raises:
            OSError: nothing was written. :class:`PeriodicWriter` may give the same rows again.
        """
        raise NotImplementedError


class MediaWriter(RowWriter):
    """A writer of rows, images, histograms and texts, with the names of :func:`group_rows`."""

    takes_media = True

    @abstractmethod
    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one iteration. After an OSError they are given again, as by the other methods."""

    def log_image(self, iteration: int, name: str, image: torch.Tensor) -> None:
        """Write an image; see :meth:`EventStorage.put_image`."""

    def log_histogram(self, iteration: int, name: str, histogram: dict[str, Any]) -> None:
        """Write a histogram: the arguments of ``SummaryWriter.add_histogram_raw``."""

    def log_text(self, iteration: int, name: str, text: str) -> None:
        """Write a text."""

    def collect(self, storage: EventStorage) -> None:
        first = self._last_write + 1  # media of an iteration that is already written get the next one, as scalars do
        waiting: list[tuple[Any, ...]] = [*self._waiting]
        waiting += [(self.log, *row) for row in group_rows(self._new_rows(storage), storage)]
        waiting += [(self.log_image, max(it, first), name, image) for name, image, it in storage._vis_data]
        waiting += [(self.log_histogram, max(h["global_step"], first), h["tag"], h) for h in storage._histograms]
        waiting += [(self.log_text, max(it, first), name, text) for name, text, it in storage._texts]
        self._waiting = waiting

    def deliver(self) -> None:
        while self._waiting:
            self.send(*self._waiting[0])
            self._waiting = self._waiting[1:]

    def send(self, log: Callable[..., None], iteration: int, *values: object) -> None:
        """Call one of the methods ``log``, ``log_image`` and so on."""
        log(iteration, *values)


PERFORMANCE = {
    *("time", "data_time", "samples_per_s", "items_per_s", "flops_per_s"),
    *("mfu", "total_flops", "eval_time", "eval_samples_per_s", "rss_mem", "max_mem", "reserved_mem", "grad_scale"),
}


def group_rows(rows: Sequence[Row], storage: EventStorage) -> list[Row]:
    """Return rows with the names that TensorBoard and trackers use.

    ============================================  ==================================================
    metric                                        name
    ============================================  ==================================================
    speed and memory: ``time``, ``mfu``, ...      ``perf/time``
    results of an evaluation: ``digits/accuracy`` ``eval/digits/accuracy``
    other names with a slash: ``weights/norm``    unchanged
    all others: ``loss``, ``lr``, ``grad_norm``   ``train/loss``
    ``eta_seconds``                               left out
    ``total_loss`` of a model with one loss       left out, since it is the same number
    ============================================  ==================================================
    """
    smoothed = storage.smoothing_hints()
    losses = {name for name in smoothed if smoothed[name] and "loss" in name and "/" not in name} - {"total_loss"}
    renamed = []
    for iteration, values in rows:
        new = {_group(name, storage) + name: value for name, value in values.items() if name != "eta_seconds"}
        if len(losses) == 1 and repr(values.get("total_loss")) == repr(values.get(*losses)):  # also if both are NaN
            new.pop("train/total_loss", None)
        if new:
            renamed.append((iteration, new))
    return renamed


def _group(name: str, storage: EventStorage) -> str:
    if name in storage.evaluated:
        return "eval/"
    if "/" in name:
        return ""
    return "perf/" if name in PERFORMANCE else "train/"


# Metrics of ours that lines and bars show in another form, or not at all.
_NOT_SHOWN = frozenset({"eta_seconds", "time", "data_time", "num_items", "slowest_rank"})


def metrics_to_show(metrics: Mapping[str, float], storage: EventStorage) -> dict[str, float]:
    """Return the metrics that a line or a bar shows: all that models and hooks put.

    Left out are results of evaluations, which have a line of their own, and ``total_loss`` if there is only one loss.
    """
    smoothed, total = storage.smoothing_hints(), repr(metrics.get("total_loss"))  # a text: NaN equals NaN
    shown = {name: one for name, one in metrics.items() if name not in _NOT_SHOWN and name not in storage.evaluated}
    if any(name != "total_loss" and smoothed.get(name) and repr(one) == total for name, one in shown.items()):
        del shown["total_loss"]
    return shown


def format_number(value: float) -> str:
    """Format a metric: four digits, and all digits of a count."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


_LONGEST_ETA = 10**10  # seconds; a timedelta cannot hold much more


@WRITER_REGISTRY.register()
class CommonMetricPrinter(EventWriter):
    """Logs a line with ETA, iteration, metrics, time and data time per step, learning rate and GPU memory.

    The metrics are all that models and hooks have put in this run, losses first; results of evaluations have lines of
    their own. Beside a progress bar, only ``log.txt`` has these lines.

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
        latest = storage.latest_with_smoothing_hint(self._window_size)
        # The iteration of the latest metric: after the last step storage.iter is one more.
        steps = [it for name, (_, it) in latest.items() if it <= storage.iter and name not in storage.evaluated]
        iteration = max(steps, default=-1)
        if iteration < self._start_iter:
            iteration = storage.iter
        if self._last_write is not None and iteration <= self._last_write[0]:
            return  # no progress to report
        ended = iteration == self._max_iter  # the rest was put after the last step
        first = iteration if ended else self._start_iter
        metrics = {name: value for name, (value, it) in latest.items() if it >= first}
        shown = metrics_to_show(metrics, storage)
        if ended and not shown:
            return
        eta = "" if ended else self._get_eta(storage)
        parts = [f"eta: {eta}"] if eta else []
        parts.append(f"iter: {iteration}" if self._max_iter is None else f"iter: {iteration}/{self._max_iter}")
        names = sorted(shown, key=lambda name: "loss" not in name)
        parts += [f"{name}: {format_number(shown[name])}" for name in names if name != "lr"]
        parts += [f"{name}: {format_seconds(metrics[name])}" for name in ("time", "data_time") if name in metrics]
        if "lr" in metrics:
            parts.append(f"lr: {metrics['lr']:.5g}")
        if torch.cuda.is_initialized():
            parts.append(f"max_mem: {torch.cuda.max_memory_allocated() / 2**20:.0f}M")
        self._last_write = (iteration, time.perf_counter())
        self.logger.info("  ".join(parts), extra={"shown_in": "bar"})

    def _get_eta(self, storage: EventStorage) -> str:
        """Return the time left, from the median step time or, without one, from the time since the last line; and from
        the time of the last evaluation.

        Empty if it is not known. Printers of detectron2's projects call this method.
        """
        if self._max_iter is None:
            return ""
        time_per_step = storage.histories().get("time")
        # After a stopped run's last step storage.iter is one more than the iteration that the row is of.
        iteration = storage.iter if time_per_step is None else time_per_step.latest_iter()
        left, others = max(self._max_iter - iteration - 1, 0), sum(storage.evaluations_left.values())
        if time_per_step is not None:
            step = time_per_step.smoothed(self._window_size)
            storage.put_scalar("eta_seconds", step * left + others, smoothing_hint=False, cur_iter=iteration)
        elif self._last_write is not None and storage.iter > self._last_write[0]:
            step = (time.perf_counter() - self._last_write[1]) / (storage.iter - self._last_write[0])
        else:
            return ""
        return str(datetime.timedelta(seconds=min(int(step * left + others), _LONGEST_ETA)))
