"""When writers write, and what happens when they fail."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from ...config import Duration
from ...config.files.atomic import OnError, WriteError, check_on_error
from ..base import HOOK_REGISTRY, HookBase
from ..every import Every, Period
from .base import EndOfRun, EventWriter, RowWriter

__all__ = ["PeriodicWriter"]

logger = logging.getLogger(__name__)

_DELAY = 0.5
"""Seconds between two uses of the thread: each takes Python's lock from training, which costs more than a small job."""
_MAX_JOBS = 1000
"""Jobs that wait for the thread, or for a retry. Of more, training waits for the thread; failed ones are dropped."""

Job = tuple[EventWriter, Callable[[], Any]]


@HOOK_REGISTRY.register()
class PeriodicWriter(HookBase):
    """Calls the writers every ``period``, at the last step, and at the end of training.

    It acts at the end of a step, after every other hook, wherever it stands in the list: a metric put by any hook
    during the step is written with that step. Writers begin (:meth:`EventWriter.resume`) when the first step is done.

    Writers of rows (:class:`RowWriter`: JSON, CSV, TensorBoard, trackers) write on a background thread, which gets
    what half a second has collected. Before a checkpoint is saved and at the end, all rows are written and synced to
    the disk. Other writers are called at once. Saves the writers' position.

    Rows that cannot be written (an OSError) are retried at the next write, checkpoint or end of the run. If the retry
    fails too, ``on_error`` decides.

    Args:
        writers: the writers.
        period: a duration; 20 iterations by default.
        on_error: "stop" raises a WriteError; "continue" logs an error and keeps the rows in memory. Rows that are
            still not written at the end of the run raise a WriteError in both cases.
    """

    _period = Period(at_end=True)
    _due_at = -1
    _waiting = False

    def __init__(
        self, writers: Iterable[EventWriter], period: "Duration | int | str" = 20, on_error: OnError = "stop"
    ) -> None:
        self._writers = list(writers)
        for writer in self._writers:
            if not isinstance(writer, EventWriter):
                raise TypeError(f"PeriodicWriter takes EventWriters, not {writer!r}")
        check_on_error(on_error)
        self._row_writers = [writer for writer in self._writers if isinstance(writer, RowWriter)]
        self._every = Every(period, at_end=True)
        self._on_error = on_error
        self._ending = False
        self._seen = 0
        self._state: dict[str, Any] | None = None
        self._jobs: list[Job] = []
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._next_use = 0.0
        # The thread uses these; training only while the thread is idle.
        self._failed: list[Job] = []
        self._failures: dict[EventWriter, tuple[int, WriteError]] = {}  # in a row, and the last of them

    def before_train(self) -> None:
        self._every.start()
        if self._state:  # a second train() continues, as a resume does
            self.load_state_dict(self._state)
        self._ending, self._waiting = False, True
        self._seen, self._due_at = self.trainer.storage.loaded, -1
        self._jobs, self._failed, self._failures = [], [], {}

    def _open(self) -> None:
        """Begin to write after the first step: an error before changes no file."""
        if not self._waiting:
            return
        self._waiting = False
        for writer in self._writers:
            try:
                writer.resume(self.trainer.start_iter)
            except OSError as error:
                if self._on_error == "stop" or bool(getattr(writer, "path", "")):
                    raise _write_error(writer, error) from error
                logger.error("Training continues: %s", error)  # a tracker: its next write tries again

    def after_step(self) -> None:
        if self._waiting:
            self._open()
        if self._every(self.trainer):
            self._due_at = self.trainer.iter
            self.trainer.request_write(everywhere=True, due=True)

    def after_train(self) -> None:
        self._ending = True
        self.trainer.request_write()

    def on_write(self) -> None:
        if self.trainer.only_due and self._due_at != self.trainer.iter:
            return
        if self._waiting and self.trainer.failed:
            self._waiting = False
            _raise_all(self._for_all(lambda writer: writer.close()))
            return
        self._open()
        storage = self.trainer.storage
        if self._ending:
            # The last rows are off schedule: those of an interruption, or of the final evaluation. A run that continues
            # writes them again, from the storage, together with what its first step puts.
            self._state = self._position()
        errors = self._for_all(self._collect)
        if any(writer.takes_media for writer in self._row_writers) and not self._ending:
            storage.clear_media()
        if self._ending:
            errors += self._write_all()
            errors += self._for_all(lambda writer: self._call(writer, writer.close))
        elif len(self._jobs) > _MAX_JOBS:
            errors += self._write_all()
        elif time.monotonic() >= self._next_use and (self._running is None or self._running.done()):
            errors += self._wait()
            if self._jobs or self._failed:
                self._start()
        _raise_all(errors)
        if self.trainer.listens("after_write"):
            window = next((writer._window_size for writer in self._row_writers), 20)
            rows, self._seen = storage.rows(window, self._seen)
            self.trainer.emit("after_write", {name: value for _, row in rows for name, value in row.items()})

    def before_save(self, path: str) -> None:
        self._jobs += [(writer, writer.sync) for writer in self._writers]
        _raise_all(self._write_all())

    def after_run(self) -> None:  # after the last checkpoint
        errors = self._write_all()
        if self._failed and self._on_error == "continue":
            errors.append(self._failures[self._failed[0][0]][1])
        errors += self._for_all(lambda writer: self._call(writer, partial(writer.finish, self._end_of_run())))
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        _raise_all(errors)

    def _end_of_run(self) -> EndOfRun:
        trainer = self.trainer
        if trainer.failed:
            return "failed"
        return "interrupted" if trainer.interrupted else "stopped" if trainer.stopped else "completed"

    def set_max_iter(self, max_iter: int) -> None:
        """Tell writers that show the time left that the length of the run has changed."""
        for writer in self._writers:
            if getattr(writer, "_max_iter", None) is not None:
                writer._max_iter = max_iter  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return self._state or self._position()

    def _position(self) -> dict[str, Any]:
        """Return the position of the writers of rows. It is the same for all, except for those with a write() of their
        own, which may not read rows."""
        return max((writer.state_dict() for writer in self._row_writers), key=lambda state: state["seen"], default={})

    def reset_state(self) -> None:
        self._state = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = None
        for writer in self._row_writers:
            writer.load_state_dict(state_dict)

    # ------------------------------------------------------------------ writing

    def _collect(self, writer: EventWriter) -> None:
        """Append the job of a writer of rows; call any other writer."""
        if not isinstance(writer, RowWriter) or type(writer).write is not RowWriter.write:
            self._call(writer, writer.write)  # an overridden write() may read the storage
        elif job := writer.collect(self.trainer.storage):
            self._jobs.append((writer, job))

    def _call(self, writer: EventWriter, function: Callable[[], None]) -> None:
        """Call a writer that is not retried."""
        try:
            function()
        except OSError as error:
            if self._on_error == "stop":
                raise _write_error(writer, error) from error
            logger.error("Training continues: %s", _write_error(writer, error))

    def _for_all(self, function: Callable[[EventWriter], None]) -> list[Exception]:
        """Call ``function`` for every writer, and return the errors."""
        errors: list[Exception] = []
        for writer in self._writers:
            try:
                function(writer)
            except Exception as error:
                errors.append(error)
        return errors

    def _start(self) -> None:
        """Give the jobs to the thread, which is idle."""
        jobs, self._jobs = self._jobs, []
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "hookline-writers")
        self._running = self._thread.submit(self._run, jobs)
        self._next_use = time.monotonic() + _DELAY

    def _wait(self) -> list[Exception]:
        """Wait for the thread, and return its errors."""
        try:
            if self._running is not None:
                self._running.result()
        except Exception as error:
            self._running = None
            return [error]
        self._running = None
        return []

    def _write_all(self) -> list[Exception]:
        """Run all jobs, those that failed before included, and return the errors."""
        errors = self._wait()
        if self._jobs:
            self._start()
            errors += self._wait()
        if self._failed and not errors:
            self._start()
            errors += self._wait()
        return errors

    def _run(self, jobs: list[Job]) -> None:
        """Run the jobs that failed earlier, then ``jobs``."""
        jobs, self._failed = [*self._failed, *jobs], []
        failed: dict[EventWriter, WriteError] = {}
        errors: list[Exception] = []
        for writer, job in jobs:
            try:
                if writer not in failed:  # else keep the order of rows
                    job()
                    continue
            except OSError as error:
                failed[writer] = _write_error(writer, error)
            except Exception as error:
                errors.append(error)
                continue
            self._failed.append((writer, job))
        for writer in self._failures.keys() - failed.keys():
            if self._failures.pop(writer)[0] > 1:
                logger.info("%s can be written again: no row was lost", getattr(writer, "path", writer))
        for writer, failure in failed.items():
            times = self._failures.get(writer, (0, failure))[0] + 1
            self._failures[writer] = (times, failure)
            if times == 1:
                logger.warning("Will retry: %s", failure)
            elif times == 2 and self._on_error == "stop":
                errors.append(failure)
            elif times == 2:
                logger.error("Training continues, and the rows wait in memory: %s", failure)
        if len(self._failed) > _MAX_JOBS:
            logger.error("Dropping the oldest rows that could not be written, to limit memory")
            del self._failed[:-_MAX_JOBS]
        _raise_all(errors)


def _raise_all(errors: Sequence[Exception]) -> None:
    """Raise the first error, with the others as notes. Do nothing if there are none."""
    for other in errors[1:]:
        errors[0].add_note(f"then also: {type(other).__name__}: {other}")
    if errors:
        raise errors[0]


def _write_error(writer: EventWriter, error: OSError) -> WriteError:
    if isinstance(error, WriteError):
        return error
    written = WriteError.of(getattr(writer, "path", "") or type(writer).__name__, error)
    written.__cause__ = error
    return written
