"""When writers write, and what happens when they fail."""

import logging
import time
from collections.abc import Callable, Iterable
from operator import methodcaller
from typing import Any

from ...config import Duration
from ...config.atomic import OnError, WriteError, check_on_error
from ..base import HOOK_REGISTRY, Every, HookBase, Period, for_subclasses
from ..common import run_folder
from ..history_buffer import MeanWindow
from .base import EventWriter, RowWriter

logger = logging.getLogger(__name__)

_DELAY = 0.5
"""Seconds between two accesses to the files: one for many rows costs far less than one for each row."""


def smoothing_window(period: int | str, iters_per_epoch: int | None) -> int:
    """Return the window of smoothed metrics: a row is the mean since the last one, or a median if it has few steps.

    Args:
        period: the time between two rows, a duration.
        iters_per_epoch: None if unknown.
    """
    duration = Duration.parse(period)
    epoch = iters_per_epoch if duration.unit == "ep" else None
    if not epoch and not (duration and duration.unit == "it"):
        return 20
    window = duration.iterations(epoch)
    return MeanWindow(window) if epoch or window > 20 else window


@HOOK_REGISTRY.register()
class PeriodicWriter(HookBase):
    """Calls the writers every ``period``, at the last step, and at the end of training.

    It writes in ``on_write``, after every other hook, wherever it stands in the list: a metric put by any hook during
    the step is written with that step. Writers begin (:meth:`EventWriter.resume`) when the first step is done.

    Writers of rows (:class:`RowWriter`: JSON, CSV, TensorBoard, trackers) write what half a second has collected.
    Before a checkpoint is saved and at the end, all rows are written and synced to the disk. Other writers are called
    at once. Saves the writers' position.

    Args:
        writers: the writers.
        period: a duration; 20 iterations by default.
        on_error: what happens if rows cannot be written (an OSError). "stop" raises a WriteError. "continue" logs an
            error, keeps the rows in memory and writes them later; rows that are still not written at the end of the
            run raise a WriteError.
    """

    _period = Period(at_end=True)
    _due = _waiting = False

    def __init__(
        self, writers: Iterable[EventWriter], period: "Duration | int | str" = 20, on_error: OnError = "stop"
    ) -> None:
        self._writers = list(writers)
        self._row_writers: list[RowWriter] = []
        for writer in self._writers:
            if isinstance(writer, RowWriter):
                self._row_writers.append(writer)
            elif not isinstance(writer, EventWriter):
                raise TypeError(f"PeriodicWriter takes EventWriters, not {writer!r}")
        check_on_error(on_error)
        self._every = Every(period, at_end=True)
        self._on_error = on_error
        self._seen = 0
        self._state: dict[str, Any] | None = None
        self._failing: set[int] = set()  # ids of writers whose error is logged; a dataclass has no hash
        self._next_write = 0.0

    def before_train(self) -> None:
        self._every.start()
        if self._state:  # a second train() continues, as a resume does
            self.load_state_dict(self._state)
        self._due, self._waiting = False, True
        storage, folder = self.trainer.storage, run_folder(self.trainer)
        self._seen, self._take_media = storage.loaded, False
        for writer in self._row_writers:
            self._take_media |= writer.takes_media
            if folder is not None:
                writer.use_folder(folder)
        storage.saves_media |= self._take_media
        self._has_own_step = type(self).after_step is not PeriodicWriter.after_step
        if self._has_own_step:  # it may write by itself
            self._open()

    def _open(self) -> None:
        """Begin to write after the first step: an error before changes no file."""
        if self._waiting:
            self._for_all(methodcaller("resume", self.trainer.start_iter), strict=True)
            self._waiting = False

    @for_subclasses
    def after_step(self) -> None:
        self._due = self._every(self.trainer)

    def on_write(self) -> None:
        trainer = self.trainer
        ending = trainer.ending
        if self._waiting:
            if trainer.failed:
                return
            self._open()
        due = ending or (self._due if self._has_own_step else self._every(trainer))
        if not due and "write" not in trainer.requests:
            return
        storage = trainer.storage
        if not ending:
            trainer.prepare_for("write")
        else:
            # The last rows are off schedule: those of an interruption, or of the final evaluation. A run that continues
            # writes them again, from the storage, together with what its first step puts.
            self._state = self._position()
        acts = [self._collect, self._deliver] if ending or time.monotonic() >= self._next_write else [self._collect]
        try:
            self._for_all(*acts)
        finally:
            if not ending and self._take_media:
                storage.clear_media()
        if trainer.listens("after_write"):
            window = self._row_writers[0]._window_size if self._row_writers else 20
            rows, self._seen = storage.rows(window, self._seen)
            trainer.emit("after_write", {name: value for _, row in rows for name, value in row.items()})

    def before_save(self, path: str) -> None:
        self._for_all(self._deliver, methodcaller("sync"))

    def after_run(self) -> None:  # after the last checkpoint
        trainer = self.trainer
        how = "interrupted" if trainer.interrupted else "stopped" if trainer.stopped else "completed"
        finish = methodcaller("finish", "failed" if trainer.failed else how)
        self._for_all(self._deliver, methodcaller("close"), finish, strict=True)

    def _collect(self, writer: EventWriter) -> None:
        if isinstance(writer, RowWriter) and type(writer).write is RowWriter.write:
            writer.collect(self.trainer.storage)
        else:
            writer.write()  # an overridden write() may read the storage

    def _deliver(self, writer: EventWriter) -> None:
        self._next_write = time.monotonic() + _DELAY
        if isinstance(writer, RowWriter):
            writer.deliver()
        self._failing.discard(id(writer))

    def _for_all(self, *acts: Callable[[EventWriter], object], strict: bool = False) -> None:
        """Do each of ``acts`` with every writer, then raise the first error that ends training: with ``strict`` any."""
        errors: list[Exception] = []
        for act in acts:
            for writer in self._writers:
                try:
                    act(writer)
                except OSError as error:
                    failure = error
                    if not isinstance(error, WriteError):
                        failure = WriteError.of(getattr(writer, "path", "") or type(writer).__name__, error)
                        failure.__cause__ = error
                    if strict or self._on_error == "stop":
                        errors.append(failure)
                    elif id(writer) not in self._failing:
                        self._failing.add(id(writer))
                        logger.error("Training continues, and rows wait in memory: %s", failure)
                except Exception as error:
                    errors.append(error)
        for other in errors[1:]:
            errors[0].add_note(f"then also: {type(other).__name__}: {other}")
        if errors:
            raise errors[0]

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
        for writer in self._row_writers:
            writer.reset()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = None
        for writer in self._row_writers:
            writer.load_state_dict(state_dict)
