"""When writers write, and what happens when they fail."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ...config import ConfigError, Duration
from ...config.files.atomic import OnError, WriteError, check_on_error
from ..base import HOOK_REGISTRY, HookBase
from ..every import Every, Period
from .background import Background, raise_all
from .base import EndOfRun, EventWriter, RowWriter
from .tracker import TrackerError

__all__ = ["PeriodicWriter"]

logger = logging.getLogger(__name__)

_MAX_UNWRITTEN = 1000
"""Failed jobs that wait for a retry; older ones are dropped."""

Job = tuple[RowWriter, Callable[[], None]]


@HOOK_REGISTRY.register()
class PeriodicWriter(HookBase):
    """Calls the writers every ``period``, at the last step, and at the end of training.

    It acts at the end of a step, after every other hook, wherever it stands in the list: a metric put by any hook
    during the step is written with that step. Writers begin (:meth:`EventWriter.resume`) when the first step is done.

    Writers of rows (:class:`RowWriter`: JSON, CSV, TensorBoard, trackers) write on a background thread, within about
    half a second. Before a checkpoint is saved and at the end, all rows are written and synced to the disk; trackers
    deliver on threads of their own. Other writers are called at once. Saves the writers' states.

    Rows that cannot be written (an OSError) are retried at the next write, checkpoint or end of the run. If the retry
    fails too, ``on_error`` decides.

    Args:
        writers: the writers.
        period: a duration; 20 iterations by default.
        background: whether to use the background thread.
        on_error: "stop" raises a WriteError; "continue" logs an error and keeps the rows in memory. Rows that are
            still not written at the end of the run raise a WriteError in both cases.

    Raises:
        ConfigError: two writers of rows have the same key in checkpoints.
    """

    _period = Period(at_end=True)
    _due_at = -1
    _waiting = False

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
        self._row_writers = _by_key(self._writers)
        self._every = Every(period, at_end=True)
        self._ending = False
        self._seen = 0
        self._background = Background() if background else None
        self._on_error = on_error
        self._state: dict[str, Any] | None = None
        self._final_error: WriteError | None = None
        # The background thread uses these; other threads only while it is idle.
        self._unwritten: list[Job] = []
        self._failures: dict[str, tuple[int, WriteError]] = {}  # consecutive failures of each writer, and the last

    def before_train(self) -> None:
        self._every.start()
        if self._state:  # a second train() continues, as a resume does
            self.load_state_dict(self._state)
        self._ending = False
        self._seen, self._due_at = 0, -1
        self._state = self._final_error = None
        self._unwritten, self._failures = [], {}
        self._waiting = True

    def _open(self) -> None:
        """Begin to write after the first step: an error before changes no file."""
        if not self._waiting:
            return
        self._waiting = False
        for writer in self._writers:
            try:
                writer.resume(self.trainer.start_iter)
            except TrackerError as error:  # the next write tries again
                if self._on_error == "stop":
                    raise
                logger.error("Training continues: %s", error)
            except OSError as error:
                raise _write_error(writer, error) from error

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
        errors: list[BaseException] = []
        if self._waiting and self.trainer.failed:
            self._waiting = False
            raise_all(self._close())
            return
        self._open()
        if self._ending:
            # The last rows are off schedule: those of an interruption, or of the final evaluation. A run that continues
            # writes them again, from the storage, together with what its first step puts.
            errors += _try(self._save_state)
        jobs: list[Job] = []
        for writer in self._writers:
            errors += _try(partial(self._collect, writer, jobs))
        if jobs:
            errors += _try(partial(self._submit, jobs))
        if self._ending:
            errors += self._close()
        raise_all(errors)
        if self.trainer.listens("after_write"):
            self.trainer.emit("after_write", self._new_metrics())

    def before_save(self, path: str) -> None:
        errors = _try(partial(self._submit, [(writer, writer.sync) for writer in self._row_writers.values()]))
        errors += self._drain_and_retry()
        for writer in self._writers:
            if not isinstance(writer, RowWriter):
                self._call(writer, writer.sync)
        raise_all(errors)

    def check_files(self) -> None:
        """Compare the files with the checkpoint of a complete run, of which nothing is left to train."""
        for writer in self._row_writers.values():
            try:
                writer.check_file()
            except OSError as error:
                raise _write_error(writer, error) from error

    def after_run(self) -> None:  # after the last checkpoint
        errors: list[BaseException] = [] if self._final_error is None else [self._final_error]
        for writer in self._writers:
            errors += _try(partial(self._call, writer, partial(writer.finish, self._end_of_run())))
        if self._background is not None:  # the last checkpoint has used it again
            errors += _try(self._background.close)
        raise_all(errors)

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
        return self._state or self._writers_state()

    def _save_state(self) -> None:
        self._state = self._writers_state()

    def _writers_state(self) -> dict[str, Any]:
        self._open()
        self._drain()
        states = {key: writer.state_dict() for key, writer in self._row_writers.items()}
        return {"writers": states} if states else {}

    def reset_state(self) -> None:
        self._state = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state, states = None, state_dict["writers"]
        for key, writer in self._row_writers.items():
            if key in states:
                writer.load_state_dict(states[key])
            else:
                logger.info("The checkpoint has no state of writer %s: it starts with the rows of this run", key)
        for key in states.keys() - self._row_writers.keys():
            logger.info("The checkpoint has the state of writer %s, which this run does not have", key)

    # ------------------------------------------------------------------ writing

    def _collect(self, writer: EventWriter, jobs: list[Job]) -> None:
        """Append the job of a writer of rows to ``jobs``; call any other writer."""
        if not isinstance(writer, RowWriter) or type(writer).write is not RowWriter.write:
            self._call(writer, writer.write)  # an overridden write() may read the storage
        elif (job := writer.collect(self.trainer.storage)) is not None:
            jobs.append((writer, job))

    def _call(self, writer: EventWriter, function: Callable[[], None]) -> None:
        """Call a writer that is not retried."""
        try:
            function()
        except OSError as error:
            if self._on_error == "stop":
                raise _write_error(writer, error) from error
            logger.error("Training continues: %s", _write_error(writer, error))

    def _submit(self, jobs: list[Job]) -> None:
        if self._background is None:
            self._run(jobs)
        else:
            self._background.submit(partial(self._run, jobs))

    def _drain(self) -> None:
        if self._background is not None:
            self._background.drain()

    def _drain_and_retry(self) -> list[BaseException]:
        errors = _try(self._drain)
        if self._unwritten and not errors:
            errors = _try(partial(self._submit, [])) + _try(self._drain)
        return errors

    def _run(self, jobs: list[Job]) -> None:
        """Run the jobs that failed earlier, then ``jobs``."""
        jobs, self._unwritten = [*self._unwritten, *jobs], []
        failed: dict[str, WriteError] = {}
        errors: list[BaseException] = []
        for writer, job in jobs:
            key = _key(writer)
            if key in failed:  # keep the order of rows
                self._unwritten.append((writer, job))
                continue
            try:
                job()
            except OSError as error:
                failed[key] = _write_error(writer, error)
                self._unwritten.append((writer, job))
            except Exception as error:
                errors.append(error)
        for key in self._failures.keys() - failed.keys():
            if self._failures.pop(key)[0] > 1:
                logger.info("%s can be written again: no row was lost", key)
        for key, failure in failed.items():
            errors += self._count_failure(key, failure)
        if len(self._unwritten) > _MAX_UNWRITTEN:
            logger.error("Dropping the oldest rows that could not be written, to limit memory")
            del self._unwritten[:-_MAX_UNWRITTEN]
        raise_all(errors)

    def _count_failure(self, key: str, error: WriteError) -> list[BaseException]:
        """Log a failure; return it if it ends the run."""
        times = self._failures[key][0] + 1 if key in self._failures else 1
        self._failures[key] = (times, error)
        if times == 1:
            logger.warning("Will retry: %s", error)
        elif times == 2 and self._on_error == "stop":
            return [error]
        elif times == 2:
            logger.error("Training continues, and the rows wait in memory: %s", error)
        return []

    def _close(self) -> list[BaseException]:
        errors = self._drain_and_retry()
        if self._unwritten and not errors:
            self._final_error = self._failures[_key(self._unwritten[0][0])][1]
        if self._background is not None:
            self._background.close()
        for writer in self._writers:
            try:
                writer.close()
            except OSError as error:
                self._final_error = self._final_error or _write_error(writer, error)
            except Exception as error:
                errors.append(error)
        if self._final_error is not None and self._on_error == "stop":
            errors.append(self._final_error)
            self._final_error = None
        return errors

    def _new_metrics(self) -> Mapping[str, float]:
        windows = [writer._window_size for writer in self._row_writers.values()]  # as they write it
        rows, self._seen = self.trainer.storage.rows(windows[0] if windows else 20, self._seen)
        metrics: dict[str, float] = {}
        for _, values in rows:
            metrics |= values
        return metrics


def _try(function: Callable[[], Any]) -> list[BaseException]:
    """Call ``function`` and return its error, if any, as a list."""
    try:
        function()
    except Exception as error:
        return [error]
    return []


def _key(writer: RowWriter) -> str:
    """Return the name for a writer's state: not its position in the list, which may change."""
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
                f"two writers have the same key {key!r} in checkpoints: give them files with different names, or set "
                "state_key of one of them"
            )
        keyed[key] = writer
    return keyed


def _write_error(writer: EventWriter, error: OSError) -> WriteError:
    if isinstance(error, WriteError):
        return error
    written = WriteError.of(getattr(writer, "path", "") or type(writer).__name__, error)
    written.__cause__ = error
    return written
