"""Where metrics leave the run: writers to files, and the hook that tells them when."""

import json
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ..config import Duration, Registry
from ..config.files import replace_file
from .background import Background
from .base import HOOK_REGISTRY, Every, HookBase
from .events import EventStorage, Row, get_event_storage

__all__ = ["WRITER_REGISTRY", "EventWriter", "JSONWriter", "PeriodicWriter", "RowWriter"]

logger = logging.getLogger(__name__)

WRITER_REGISTRY: Registry = Registry("WRITER")
"""Writers that a config's ``LOG.WRITERS`` may name. They are offered ``output_dir``, ``max_iter``, ``window_size``."""


class EventWriter:
    """Takes metrics out of the :class:`~hookline.hooks.EventStorage` that is active, to wherever they shall go."""

    def write(self) -> None:
        """Write what is new in ``get_event_storage()``."""
        raise NotImplementedError

    def resume(self, start_iter: int) -> None:
        """A run starts at ``start_iter``: forget what an earlier one wrote from there on, so that nothing stands twice.

        Called before training by :class:`PeriodicWriter`.
        """

    def close(self) -> None:
        """Finish; a later :meth:`write` opens again what it needs."""


class RowWriter(EventWriter):
    """A writer of rows: a subclass defines :meth:`write_rows`, and is given every metric exactly once.

    Args:
        window_size: iterations over which smoothed metrics are reported as their median.
    """

    def __init__(self, window_size: int = 20) -> None:
        self._window_size = window_size
        self._last_write = -1
        self._seen = 0
        self._storage: Callable[[], EventStorage | None] = lambda: None
        self._resumed = False

    def resume(self, start_iter: int) -> None:
        # The last run may have written at its end what this one writes again: an evaluation after the last step.
        self._last_write = min(self._last_write, start_iter - 1)

    def _first_to_write(self, start_iter: int) -> int:
        """The iteration from which on the rows come from this run.

        A checkpoint may hold metrics from before it that were not yet written: those come before ``start_iter``.
        """
        return self._last_write + 1 if self._resumed else start_iter

    def state_dict(self) -> dict[str, int]:
        """How far in the storage, and to which iteration, it has written."""
        return {"seen": self._seen, "last_write": self._last_write}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on in the next run's storage, which holds the state of the earlier one's, where this was."""
        self._seen, self._last_write = state_dict["seen"], state_dict["last_write"]
        self._resumed = True

    def write(self) -> None:
        job = self.collect(get_event_storage())
        if job is not None:
            job()

    def collect(self, storage: EventStorage) -> Callable[[], None] | None:
        """Take what is new in ``storage``.

        Returns:
            The writing of it, to be called now or later, on any thread, in order; None if there is nothing new.
        """
        rows = self._new_rows(storage)
        return partial(self.write_rows, rows) if rows else None

    def _new_rows(self, storage: EventStorage) -> list[Row]:
        if self._storage() is not storage:  # another run began
            if not self._resumed:
                self._seen, self._last_write = 0, -1
            self._storage, self._resumed = weakref.ref(storage), False
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
        """Write rows whose iterations ascend, and are greater than those of all rows before."""
        raise NotImplementedError


@WRITER_REGISTRY.register()
class JSONWriter(RowWriter):
    """One JSON object a line: ``{"iteration": 19, "lr": 0.1, "total_loss": 1.2}``, iterations ascending.

    Args:
        json_file: path of the file. Rows are appended to what is there.
        window_size: see :class:`RowWriter`.
        output_dir: the run's folder, used where ``json_file`` is not given: ``metrics.json`` in it.
    """

    def __init__(self, json_file: str | None = None, window_size: int = 20, output_dir: str = ".") -> None:
        super().__init__(window_size)
        self._path = os.path.join(output_dir, "metrics.json") if json_file is None else json_file
        self._file: Any = None

    def resume(self, start_iter: int) -> None:
        """Cut the rows from ``start_iter`` on, and a last line torn by a crash; the file is replaced in one go.

        A run that starts from 0 keeps what is there under another name, ending in ``.old``.
        """
        super().resume(start_iter)
        if not os.path.isfile(self._path) or os.path.getsize(self._path) == 0:
            return
        if start_iter == 0:
            os.replace(self._path, self._path + ".old")
            return
        with open(self._path, "rb") as file:
            lines = file.readlines()
        first = self._first_to_write(start_iter)
        kept = [line for line in lines if _iteration(line) < first]
        if len(kept) == len(lines):
            return
        logger.info("%s: cut back to iteration %d, from where this run goes on", self._path, first)
        replace_file(self._path, lambda file: file.writelines(kept))

    def write_rows(self, rows: Sequence[Row]) -> None:
        file = self._file_handle
        for iteration, values in rows:
            file.write(json.dumps({"iteration": iteration, **dict(sorted(values.items()))}) + "\n")
        file.flush()

    @property
    def _file_handle(self) -> Any:
        """The open file."""
        if self._file is None:
            os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed in close())
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _run_all(jobs: Iterable[Callable[[], None]]) -> None:
    """Do them all, and then raise the first error there was."""
    errors: list[BaseException] = []
    for job in jobs:
        try:
            job()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _overrides_write(writer: RowWriter) -> bool:
    """Whether a subclass writes in its own way, which may look at the storage."""
    return type(writer).write is not RowWriter.write


def _iteration(line: bytes) -> float:
    """The iteration of a line of metrics; infinite for a line that is not whole."""
    try:
        return json.loads(line)["iteration"] if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


@HOOK_REGISTRY.register()
class PeriodicWriter(HookBase):
    """Calls the writers every ``period``, at the last step, and at the end of training.

    It acts at the very end of a step, after every other hook: a metric put by any hook at any event of the step is
    written with that step. Wherever it stands in the list of hooks makes no difference.

    Writers of rows (:class:`RowWriter`: JSON, TensorBoard) format and write on a thread of their own, half a second
    later at most if it keeps up; an error there is raised at the next writing. Before a checkpoint is saved, and at
    the end, all that was put is on its way to the disk. Other writers read the storage themselves, so they are
    called at once.

    Args:
        writers: the writers.
        period: a duration; 20 iterations by default.
        background: whether to use that thread.
    """

    def __init__(
        self, writers: Iterable[EventWriter], period: "Duration | int | str" = 20, background: bool = True
    ) -> None:
        self._writers = list(writers)
        for writer in self._writers:
            if not isinstance(writer, EventWriter):
                raise TypeError(f"PeriodicWriter takes EventWriters, not {writer!r}")
        self._every = Every(period, at_end=True)
        self._ending = False
        self._seen = 0
        self._background = Background() if background else None
        self._state: dict[str, Any] | None = None

    def before_train(self) -> None:
        self._every.start()
        self._ending = False
        self._seen = 0
        self._state = None
        for writer in self._writers:
            writer.resume(self.trainer.start_iter)

    def after_step(self) -> None:
        if self._every(self.trainer):
            self.trainer.request_write(everywhere=True)

    def after_train(self) -> None:
        self._ending = True
        self.trainer.request_write()

    def on_write(self) -> None:
        # What is written of a run that ends before its time is beside the schedule: a resume writes it again, as
        # the whole run would have done.
        self._state = self._writers_state() if self._ending and not self.trainer.completed else None
        errors: list[BaseException] = []
        jobs: list[Callable[[], None]] = []
        for writer in self._writers:
            try:
                self._write(writer, jobs)
            except Exception as error:  # the other writers write all the same
                errors.append(error)
        if jobs:
            try:
                self._background.submit(partial(_run_all, jobs))  # type: ignore[union-attr]
            except Exception as error:
                errors.append(error)
        if self._ending:
            errors += self._close()
        if errors:
            raise errors[0]
        if self.trainer.listens("after_write"):
            self.trainer.emit("after_write", self._new_metrics())

    def before_save(self, path: str) -> None:
        if self._background is not None:  # what the checkpoint takes for written is on its way to the disk
            self._background.drain()

    def state_dict(self) -> dict[str, Any]:
        return self._state or self._writers_state()

    def set_max_iter(self, max_iter: int) -> None:
        """Tell writers that say how long the run has to go that it has another length than when they were made."""
        for writer in self._writers:
            if getattr(writer, "_max_iter", None) is not None:
                writer._max_iter = max_iter  # type: ignore[attr-defined]

    def _writers_state(self) -> dict[str, Any]:
        writers = self._keyed_writers()
        return {"writers": {key: writer.state_dict() for key, writer in writers.items()}} if writers else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for key, writer in self._keyed_writers().items():
            if key in state_dict["writers"]:
                writer.load_state_dict(state_dict["writers"][key])

    def _keyed_writers(self) -> dict[str, RowWriter]:
        """The writers of rows, by class and number."""
        rows = [writer for writer in self._writers if isinstance(writer, RowWriter)]
        return {f"{type(writer).__name__}#{number}": writer for number, writer in enumerate(rows)}

    def _write(self, writer: EventWriter, jobs: list[Callable[[], None]]) -> None:
        """Have a writer write, or put what it has to write among the jobs for the background."""
        if self._background is None or not isinstance(writer, RowWriter) or _overrides_write(writer):
            writer.write()
            return
        job = writer.collect(self.trainer.storage)
        if job is not None:
            jobs.append(job)

    def _close(self) -> list[BaseException]:
        errors: list[BaseException] = []
        closers = [writer.close for writer in self._writers]
        if self._background is not None:
            closers.insert(0, self._background.close)
        for close in closers:
            try:
                close()
            except Exception as error:
                errors.append(error)
        return errors

    def _new_metrics(self) -> Mapping[str, float]:
        rows, self._seen = self.trainer.storage.rows(since=self._seen)
        metrics: dict[str, float] = {}
        for _, values in rows:
            metrics |= values
        return metrics
