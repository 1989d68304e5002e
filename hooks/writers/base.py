"""Base classes of writers."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from ...config import Registry
from ..storage.event_storage import EventStorage, Row, get_event_storage, has_event_storage

__all__ = ["WRITER_REGISTRY", "EndOfRun", "EventWriter", "RowWriter"]

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
            :class:`~hookline.hooks.storage.metric.MeanWindow`.

    Attributes:
        path: the file or folder that it writes; empty if it writes elsewhere.
        state_key: the name its state is saved under; by default the name of its class and of its file.
    """

    path: str = ""
    state_key: str | None = None
    # For subclasses with a write() of their own that do not call __init__, as projects of detectron2 have them.
    _window_size = 20
    _last_write = -1
    _seen = 0
    _storage: Callable[[], EventStorage | None] = staticmethod(lambda: None)
    _resumed = False
    _first = 0

    def __init__(self, window_size: int = 20) -> None:
        self._window_size = window_size
        self._last_write = -1
        self._seen = 0
        self._storage = lambda: None
        self._resumed = False
        self._first = 0  # first iteration whose rows come from this run

    def resume(self, start_iter: int) -> None:
        # The last run may have evaluated after its last step, an iteration that this run writes again.
        self._last_write = min(self._last_write, start_iter - 1)
        # A checkpoint may hold earlier metrics that were not yet written.
        self._first = self._last_write + 1 if self._resumed else start_iter
        if has_event_storage():
            self._use(get_event_storage())

    def check_file(self) -> None:
        """Compare the file with the checkpoint of a complete run; log a warning if rows are missing."""

    def _use(self, storage: EventStorage) -> None:
        """Write from ``storage`` from now on."""
        if self._storage() is storage:
            return
        if not self._resumed:
            self._seen, self._last_write = storage.loaded, -1
        self._storage, self._resumed = weakref.ref(storage), False
        storage.longest_window = max(storage.longest_window, self._window_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the storage, and the last iteration written."""
        return {"seen": self._seen, "last_write": self._last_write}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load :meth:`state_dict`. The next run's storage must hold the state of the earlier one."""
        self._seen, self._last_write = state_dict["seen"], state_dict["last_write"]
        self._resumed = True

    def write(self) -> None:
        job = self.collect(get_event_storage())
        if job is not None:
            job()

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
        rows = self._merge_late(rows, storage.iter)
        if rows:
            self._last_write = rows[-1][0]
        return rows

    def _merge_late(self, rows: list[Row], now: int) -> list[Row]:
        """Merge rows of iterations that are already written into the next row, so that each iteration has one row."""
        late = [values for iteration, values in rows if iteration <= self._last_write]
        if not late:
            return rows
        rows = [row for row in rows if row[0] > self._last_write]
        if not rows:
            rows = [(max(now, self._last_write + 1), {})]
        merged: dict[str, float] = {}
        for values in late:
            merged |= values
        rows[0] = (rows[0][0], merged | rows[0][1])
        return rows

    def write_rows(self, rows: Sequence[Row]) -> None:
        """Write rows in ascending order of iterations, all greater than those of earlier calls.

        Raises:
            OSError: nothing was written. :class:`PeriodicWriter` retries the same rows.
        """
        raise NotImplementedError
