"""Where metrics leave the run: writers to files, and the hook that tells them when."""

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ...config import ConfigError, Duration, Registry
from ...config.files.write_error import OnError, WriteError, check_on_error
from ..base import HOOK_REGISTRY, HookBase
from ..every import Every
from ..storage.event_storage import EventStorage, Row, get_event_storage, has_event_storage
from .background import Background

__all__ = ["WRITER_REGISTRY", "EventWriter", "PeriodicWriter", "RowWriter"]

logger = logging.getLogger(__name__)


class EventWriter:
    """Takes metrics out of the active :class:`~hookline.hooks.EventStorage`, to a file or elsewhere."""

    def write(self) -> None:
        """Write what is new in ``get_event_storage()``."""
        raise NotImplementedError

    def resume(self, start_iter: int) -> None:
        """A run starts at ``start_iter``: drop what an earlier one wrote from there on, so that nothing stands twice.

        Called before training by :class:`PeriodicWriter`.
        """

    def sync(self) -> None:
        """Bring what was written to the disk: a checkpoint is about to be saved."""

    def close(self) -> None:
        """Finish; a later :meth:`write` opens again what it needs."""


WRITER_REGISTRY: Registry = Registry("WRITER", EventWriter)
"""Writers that a config's ``LOG.WRITERS`` may name. They are offered ``output_dir``, ``max_iter``, ``window_size``."""


class RowWriter(EventWriter):
    """A writer of rows: a subclass defines :meth:`write_rows`, and gets every metric exactly once.

    Args:
        window_size: iterations over which smoothed metrics are reported as their median.

    Attributes:
        path: the file or folder that it writes; empty if it writes elsewhere.
        state_key: the name its state is saved under; by default its class's, followed by the name of its file.
    """

    path: str = ""
    state_key: str | None = None

    def __init__(self, window_size: int = 20) -> None:
        self._window_size = window_size
        self._last_write = -1
        self._seen = 0
        self._storage: Callable[[], EventStorage | None] = lambda: None
        self._resumed = False
        self._first = 0  # the iteration from which on the rows come from this run

    def resume(self, start_iter: int) -> None:
        # The last run may have written at its end what this one writes again: an evaluation after the last step.
        self._last_write = min(self._last_write, start_iter - 1)
        # A checkpoint may hold metrics from before it that were not yet written.
        self._first = self._last_write + 1 if self._resumed else start_iter
        if has_event_storage():
            self._begin(get_event_storage())

    def _begin(self, storage: EventStorage) -> None:
        """Write from ``storage`` from now on."""
        if self._storage() is storage:
            return
        if not self._resumed:
            self._seen, self._last_write = storage.loaded, -1
        self._storage, self._resumed = weakref.ref(storage), False

    def state_dict(self) -> dict[str, Any]:
        """How far in the storage, and to which iteration, it has written."""
        return {"seen": self._seen, "last_write": self._last_write}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue in the next run's storage, which holds the state of the earlier one's."""
        self._seen, self._last_write = state_dict["seen"], state_dict["last_write"]
        self._resumed = True

    def write(self) -> None:
        job = self.collect(get_event_storage())
        if job is not None:
            job()

    def collect(self, storage: EventStorage) -> Callable[[], None] | None:
        """Take what is new in ``storage``.

        Returns:
            A function that writes it, to be called now or later, on any thread, in order; None if there is nothing
            new. It writes all or nothing: after an OSError it may be called again.
        """
        rows = self._new_rows(storage)
        return partial(self.write_rows, rows) if rows else None

    def _new_rows(self, storage: EventStorage) -> list[Row]:
        self._begin(storage)
        rows, self._seen = storage.rows(self._window_size, self._seen)
        rows = self._ascending(rows, storage.iter)
        if rows:
            self._last_write = rows[-1][0]
        return rows

    def _ascending(self, rows: list[Row], now: int) -> list[Row]:
        """Rows for iterations already written are joined to the next one that is not: no iteration stands twice."""
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
        """Write rows whose iterations ascend, and are greater than those of all rows before.

        Raises:
            OSError: nothing was written; :class:`PeriodicWriter` tries the same rows again.
        """
        raise NotImplementedError


def _overrides_write(writer: RowWriter) -> bool:
    """Whether a subclass writes in its own way, which may look at the storage."""
    return type(writer).write is not RowWriter.write


# Writings that wait for a disk that cannot be written; older ones are dropped.
_MAX_UNWRITTEN = 1000

Job = tuple[RowWriter, Callable[[], None]]


@HOOK_REGISTRY.register()
class PeriodicWriter(HookBase):
    """Calls the writers every ``period``, at the last step, and at the end of training.

    It acts at the very end of a step, after every other hook: a metric put by any hook at any event of the step is
    written with that step. Its place in the list of hooks makes no difference.

    Writers of rows (:class:`RowWriter`: JSON, CSV, TensorBoard) format and write on a thread, at most half a second
    later if it keeps up. Before a checkpoint is saved, and at the end, everything put so far is written and synced to
    the disk. Other writers read the storage themselves and are called at once. Saves the writers' states.

    Rows that cannot be written (an OSError) are tried again at the next writing, checkpoint or end of the run. If that
    fails too, ``on_error`` decides.

    Args:
        writers: the writers.
        period: a duration; 20 iterations by default.
        background: whether to use that thread.
        on_error: "stop" raises a WriteError that says what to do; "continue" logs it as an error, and rows wait in
            memory. Rows that are still not written when the run ends make it fail in both cases.

    Raises:
        ConfigError: two writers of rows have the same key: their states could not be told apart in a checkpoint.
    """

    def __init__(
        self,
        writers: Iterable[EventWriter],
        period: "Duration | int | str" = 20,
        background: bool = True,
        on_error: OnError = "stop",
    ) -> None:
        self._writers = list(writers)
        for writer in self._writers:
            if not isinstance(writer, EventWriter):
                raise TypeError(f"PeriodicWriter takes EventWriters, not {writer!r}")
        check_on_error(on_error)
        self._rows = _by_key(self._writers)
        self._every = Every(period, at_end=True)
        self._ending = False
        self._seen = 0
        self._background = Background() if background else None
        self._on_error = on_error
        self._state: dict[str, Any] | None = None
        self._lost: WriteError | None = None
        # Read and changed on the thread that writes; elsewhere only when that has nothing to do.
        self._unwritten: list[Job] = []
        self._failures: dict[str, tuple[int, WriteError]] = {}  # how often in a row each writer failed, by key

    def before_train(self) -> None:
        self._every.start()
        self._ending = False
        self._seen = 0
        self._state = self._lost = None
        self._unwritten, self._failures = [], {}
        for writer in self._writers:
            try:
                writer.resume(self.trainer.start_iter)
            except OSError as error:
                raise _write_error(writer, error) from error

    def after_step(self) -> None:
        if self._every(self.trainer):
            self.trainer.request_write(everywhere=True)

    def after_train(self) -> None:
        self._ending = True
        self.trainer.request_write()

    def on_write(self) -> None:
        errors: list[BaseException] = []
        if self._ending and not self.trainer.completed:
            # What a run writes that ends before its time is not on schedule: a resume writes it again, as the whole
            # run would have done.
            try:
                self._state = self._writers_state()
            except Exception as error:
                errors.append(error)
        jobs: list[Job] = []
        for writer in self._writers:
            try:
                if not isinstance(writer, RowWriter) or _overrides_write(writer):
                    self._call(writer, writer.write)
                elif (job := writer.collect(self.trainer.storage)) is not None:
                    jobs.append((writer, job))
            except Exception as error:  # the other writers write all the same
                errors.append(error)
        if jobs:
            errors += self._write(jobs)
        if self._ending:
            errors += self._close()
        if errors:
            raise errors[0]
        if self.trainer.listens("after_write"):
            self.trainer.emit("after_write", self._new_metrics())

    def before_save(self, path: str) -> None:
        errors = self._write([(writer, writer.sync) for writer in self._rows.values()])
        errors += self._write_again()
        for writer in self._writers:
            if not isinstance(writer, RowWriter):
                self._call(writer, writer.sync)
        if errors:
            raise errors[0]

    def after_run(self) -> None:  # when the last checkpoint is saved
        if self._lost is not None:
            raise self._lost

    def state_dict(self) -> dict[str, Any]:
        return self._state or self._writers_state()

    def set_max_iter(self, max_iter: int) -> None:
        """Tell writers that report how long the run still takes that its length has changed."""
        for writer in self._writers:
            if getattr(writer, "_max_iter", None) is not None:
                writer._max_iter = max_iter  # type: ignore[attr-defined]

    def _writers_state(self) -> dict[str, Any]:
        if self._background is not None:
            self._background.drain()
        return {"writers": {key: writer.state_dict() for key, writer in self._rows.items()}} if self._rows else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = state_dict["writers"]
        for key, writer in self._rows.items():
            if key in states:
                writer.load_state_dict(states[key])
            else:
                logger.info("The checkpoint holds no state of writer %s: it starts with the rows of this run", key)
        for key in states.keys() - self._rows.keys():
            logger.info("The checkpoint holds the state of a writer %s, which this run does not have", key)

    # ------------------------------------------------------------------ writing

    def _write(self, jobs: list[Job]) -> list[BaseException]:
        """Have the jobs done, on the thread if there is one; the errors so far."""
        try:
            if self._background is None:
                self._do(jobs)
            else:
                self._background.submit(partial(self._do, jobs))
        except Exception as error:
            return [error]
        return []

    def _write_again(self) -> list[BaseException]:
        """Wait until the jobs are done, and try those that failed once more; the errors so far."""
        errors = self._drain()
        if self._unwritten and not errors:
            errors = self._write([]) + self._drain()
        return errors

    def _drain(self) -> list[BaseException]:
        try:
            if self._background is not None:
                self._background.drain()
        except Exception as error:
            return [error]
        return []

    def _do(self, jobs: list[Job]) -> None:
        """Do those jobs that could not be done before, and then these."""
        jobs, self._unwritten = [*self._unwritten, *jobs], []
        failed: dict[str, tuple[RowWriter, OSError]] = {}
        errors: list[BaseException] = []
        for writer, job in jobs:
            key = _key(writer)
            if key in failed:  # later rows come after those that failed
                self._unwritten.append((writer, job))
                continue
            try:
                job()
            except OSError as error:
                failed[key] = (writer, error)
                self._unwritten.append((writer, job))
            except Exception as error:
                errors.append(error)
        for key in self._failures.keys() - failed.keys():
            if self._failures.pop(key)[0] > 1:
                logger.info("%s could be written again: no row was lost", key)
        errors += self._failed(failed)
        if len(self._unwritten) > _MAX_UNWRITTEN:
            logger.error("Rows that could not be written are dropped: memory is kept for the latest only")
            del self._unwritten[:-_MAX_UNWRITTEN]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"then also: {type(other).__name__}: {other}")
            raise errors[0]

    def _failed(self, failed: Mapping[str, tuple[RowWriter, OSError]]) -> list[BaseException]:
        """Count and log what could not be written; the errors that end the run."""
        errors: list[BaseException] = []
        for key, (writer, cause) in failed.items():
            error = _write_error(writer, cause)
            times = self._failures[key][0] + 1 if key in self._failures else 1
            self._failures[key] = (times, error)
            if times == 1:
                logger.warning("Will try once more: %s", error)
            elif times == 2 and self._on_error == "stop":
                errors.append(error)
            elif times == 2:
                logger.error("Training continues, and the rows wait in memory: %s", error)
        return errors

    def _call(self, writer: EventWriter, function: Callable[[], None]) -> None:
        """Call a writer that writes by itself: what it missed is its own to try again."""
        try:
            function()
        except OSError as error:
            if self._on_error == "stop":
                raise _write_error(writer, error) from error
            logger.error("Training continues: %s", _write_error(writer, error))

    def _close(self) -> list[BaseException]:
        errors = self._write_again()
        if self._unwritten and not errors:
            self._lost = self._failures[_key(self._unwritten[0][0])][1]
        if self._background is not None:
            self._background.close()
        for writer in self._writers:
            try:
                writer.close()
            except OSError as error:
                self._lost = self._lost or _write_error(writer, error)
            except Exception as error:
                errors.append(error)
        if self._lost is not None and self._on_error == "stop":
            errors.append(self._lost)
            self._lost = None
        return errors

    def _new_metrics(self) -> Mapping[str, float]:
        rows, self._seen = self.trainer.storage.rows(since=self._seen)
        metrics: dict[str, float] = {}
        for _, values in rows:
            metrics |= values
        return metrics


def _key(writer: RowWriter) -> str:
    """What the state of a writer is saved under: never its place in a list, which may change."""
    name = os.path.basename(os.path.abspath(writer.path)) if writer.path else ""
    return writer.state_key or f"{type(writer).__name__} {name}".rstrip()


def _by_key(writers: Iterable[EventWriter]) -> dict[str, RowWriter]:
    keyed: dict[str, RowWriter] = {}
    for writer in writers:
        if not isinstance(writer, RowWriter):
            continue
        key = _key(writer)
        if key in keyed:
            raise ConfigError(
                f"two writers have the same key, {key!r}: their states could not be told apart in a checkpoint. Give "
                "them files with different names, or set state_key of one of them"
            )
        keyed[key] = writer
    return keyed


def _write_error(writer: EventWriter, error: OSError) -> WriteError:
    if isinstance(error, WriteError):
        return error
    written = WriteError.of(getattr(writer, "path", "") or type(writer).__name__, error)
    written.__cause__ = error
    return written
