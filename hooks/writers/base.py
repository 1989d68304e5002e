"""Base classes of writers."""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from ...config import Registry
from ..event_storage import EventStorage, Row, get_event_storage, has_event_storage

__all__ = ["WRITER_REGISTRY", "EndOfRun", "EventWriter", "MediaWriter", "Medium", "RowWriter"]

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


WRITER_REGISTRY: Registry = Registry("WRITER", EventWriter, "hookline.hooks")
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
    _resumed = False  # a state was loaded, which the next storage continues
    _first = 0  # first iteration whose rows come from this run
    _storage: Callable[[], EventStorage | None] = staticmethod(lambda: None)

    def __init__(self, window_size: int = 20) -> None:
        self._window_size = window_size

    def resume(self, start_iter: int) -> None:
        # The last run may have evaluated after its last step, an iteration that this run writes again.
        self._last_write = min(self._last_write, start_iter - 1)
        # A checkpoint may hold earlier metrics that were not yet written.
        self._first = self._last_write + 1 if self._resumed else start_iter
        if has_event_storage():
            self._use(get_event_storage())

    def _use(self, storage: EventStorage) -> None:
        """Write from ``storage`` from now on."""
        storage.saves_media |= self.takes_media
        if self._storage() is storage:
            return
        if not self._resumed:
            self._seen, self._last_write = storage.loaded, -1
        self._storage, self._resumed = weakref.ref(storage), False

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the storage, and the last iteration written."""
        return {"seen": self._seen, "last_write": self._last_write}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load :meth:`state_dict`. The next run's storage must hold the state of the earlier one."""
        self._seen, self._last_write = state_dict["seen"], state_dict["last_write"]
        self._resumed = True

    def write(self) -> None:
        storage = get_event_storage()
        if job := self.collect(storage):
            job()
        if self.takes_media:
            storage.clear_media()

    def collect(self, storage: EventStorage) -> Callable[[], None] | None:
        """Take what is new in ``storage``.

        Returns:
            A function that writes it, or None if there is nothing new. It may be called later and on another thread.
            It writes everything or raises an OSError; then it may be called again.
        """
        rows = self._new_rows(storage)
        return partial(self.write_rows, rows) if rows else None

    def _new_rows(self, storage: EventStorage) -> list[Row]:
        self._use(storage)
        rows, self._seen = storage.rows(self._window_size, self._seen)
        late: dict[str, float] = {}
        for iteration, values in rows:
            if iteration <= self._last_write:
                late |= values
        if late:  # merge what belongs to written rows into the next one, so that each iteration has one row
            rows = [row for row in rows if row[0] > self._last_write]
            iteration, values = rows[0] if rows else (max(storage.iter, self._last_write + 1), {})
            rows[:1] = [(iteration, late | values)]
        if rows:
            self._last_write = rows[-1][0]
        return rows

    def write_rows(self, rows: Sequence[Row]) -> None:
        """Write rows in ascending order of iterations, all greater than those of earlier calls.

        Raises:
            OSError: nothing was written. :class:`PeriodicWriter` retries the same rows.
        """
        raise NotImplementedError


class Medium(NamedTuple):
    """An image, histogram or text.

    Attributes:
        kind: what it is.
        iteration: the iteration it is written for.
        name: its name.
        data: a tensor; for a histogram the arguments of ``SummaryWriter.add_histogram_raw``; or a text.
    """

    kind: Literal["image", "histogram", "text"]
    iteration: int
    name: str
    data: Any


class MediaWriter(RowWriter):
    """A writer of rows, images, histograms and texts. A subclass defines :meth:`job`.

    Args:
        window_size: see :class:`RowWriter`.
        groups: name metrics by groups, see :func:`group_rows`. False: as in ``metrics.json``.
    """

    takes_media = True
    _groups = True

    def __init__(self, window_size: int = 20, groups: bool = True) -> None:
        super().__init__(window_size)
        self._groups = groups

    @abstractmethod
    def job(self, rows: list[Row], media: Sequence[Medium]) -> Callable[[], None]:
        """Return a function that writes; see :meth:`RowWriter.collect`."""

    def collect(self, storage: EventStorage) -> Callable[[], None] | None:
        self._use(storage)
        first = self._last_write + 1  # media of an iteration that is already written get the next one, as scalars do
        media = [Medium("image", max(it, first), name, image) for name, image, it in storage._vis_data]
        for data in storage._histograms:
            media.append(Medium("histogram", max(data["global_step"], first), data["tag"], data))
        media += [Medium("text", max(it, first), name, text) for name, text, it in storage._texts]
        rows = self._new_rows(storage)
        if not (rows or media):
            return None
        return self.job(group_rows(rows, storage) if self._groups else rows, media)


_PERFORMANCE = {
    *("time", "data_time", "time_p95", "time_max", "samples_per_s", "items_per_s", "flops_per_s"),
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
    return "perf/" if name in _PERFORMANCE else "train/"
