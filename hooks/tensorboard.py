"""Where metrics go to be looked at: TensorBoard's event files."""

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from .events import EventStorage, Row
from .writers import WRITER_REGISTRY, RowWriter

__all__ = ["TensorboardXWriter"]


@WRITER_REGISTRY.register()
class TensorboardXWriter(RowWriter):
    """TensorBoard event files, of scalars, images, histograms and texts.

    Args:
        log_dir: folder of the event files.
        window_size: see :class:`RowWriter`.
        output_dir: the run's folder, used where ``log_dir`` is not given.
        **kwargs: passed to :class:`torch.utils.tensorboard.SummaryWriter`.
    """

    def __init__(self, log_dir: str | None = None, window_size: int = 20, output_dir: str = ".", **kwargs: Any) -> None:
        super().__init__(window_size)
        self._kwargs = {"log_dir": output_dir if log_dir is None else log_dir, **kwargs}
        self._walltime: float | None = None  # when the rows being written were collected, if that was not just now

    @cached_property
    def _writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # a second of import time

        writer = SummaryWriter(**self._kwargs)
        # Said once a run: a file opened later, after close(), would have this run's own points dropped.
        self._kwargs.pop("purge_step", None)
        _write_at_once(writer)
        return writer

    def resume(self, start_iter: int) -> None:
        """Have TensorBoard drop the points from ``start_iter`` on that an earlier run wrote."""
        super().resume(start_iter)
        self.close()
        self._kwargs.pop("purge_step", None)
        if start_iter > 0:
            self._kwargs["purge_step"] = self._first_to_write(start_iter)
            _wait_for_a_later_name(self._kwargs["log_dir"])
        self._writer  # noqa: B018 (imported now, not in the middle of training)

    def collect(self, storage: EventStorage) -> Callable[[], None] | None:
        since = self._seen if self._storage() is storage or self._resumed else 0
        rows = self._new_rows(storage)
        images, histograms, texts = storage.images(since), storage.histograms(since), storage.texts(since)
        if not (rows or images or histograms or texts):
            return None
        now = time.time()

        def write() -> None:
            self._walltime = now
            try:
                self.write_rows(rows)
            finally:
                self._walltime = None
            for iteration, name, image in images:
                self._writer.add_image(name, image, iteration, now)
            for _, histogram in histograms:
                self._writer.add_histogram_raw(**histogram, walltime=now)
            for iteration, name, text in texts:
                self._writer.add_text(name, text, iteration, now)

        return write

    def write_rows(self, rows: Sequence[Row]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        for iteration, values in rows:
            # One event with all values of the iteration: an event for each would cost ten times as much.
            event = Event()
            for name, value in values.items():
                event.summary.value.add(tag=name, simple_value=value)
            self._writer.file_writer.add_event(event, iteration, self._walltime)

    def close(self) -> None:
        if "_writer" in self.__dict__:
            self._writer.close()
            del self.__dict__["_writer"]


def _wait_for_a_later_name(folder: str) -> None:
    """TensorBoard reads files in the order of their names, which have the time in seconds: let another one begin, if
    a run that ended just now has written in this one."""
    stamps = [
        int(name.split(".")[3])
        for name in (os.listdir(folder) if os.path.isdir(folder) else [])
        if re.match(r"events\.out\.tfevents\.\d+\.", name)
    ]
    now = time.time()
    if stamps and max(stamps) == int(now):
        time.sleep(max(stamps) + 1 - now)


class _EventFile:
    """What tensorboard's ``EventFileWriter`` is, for a file that is there already, and without a thread of its own.

    That thread opens and closes the file for each event, and takes turns with ours and the one that trains; what
    comes here from :class:`PeriodicWriter` is on a thread already. Events are in the file when ``add_event`` returns.

    Args:
        path: the file; events are appended.
        log_dir: the folder, as it was given.
    """

    def __init__(self, path: str, log_dir: str) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._records = RecordWriter(open(path, "ab"))  # noqa: SIM115 (closed in close())
        self._log_dir = log_dir
        self._lock = threading.Lock()

    def get_logdir(self) -> str:
        return self._log_dir

    def add_event(self, event: Any) -> None:
        with self._lock:
            self._records.write(event.SerializeToString())
            self._records.flush()

    def flush(self) -> None:
        """Nothing waits to be written."""

    def close(self) -> None:
        with self._lock:
            self._records.close()


def _write_at_once(writer: Any) -> None:
    """Have a SummaryWriter write without its thread, if its file is a local one; elsewhere it goes on as it is."""
    event_writer = writer.file_writer.event_writer
    path = getattr(event_writer, "_file_name", "")
    if os.path.isfile(path):
        event_writer.close()  # what it wrote, such as purge_step, is in the file
        writer.file_writer.event_writer = _EventFile(path, event_writer.get_logdir())
