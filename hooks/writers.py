"""Where metrics leave the run: writers to files, and the hook that tells them when."""

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from ..config import Duration, Registry
from .base import HOOK_REGISTRY, Every, HookBase
from .events import Row, get_event_storage

__all__ = ["WRITER_REGISTRY", "EventWriter", "JSONWriter", "PeriodicWriter", "TensorboardXWriter"]

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
        self._storage_id: int | None = None

    def write(self) -> None:
        storage = get_event_storage()
        if id(storage) != self._storage_id:  # another run began
            self._storage_id, self._seen, self._last_write = id(storage), 0, -1
        since = self._seen
        rows, self._seen = storage.rows(self._window_size, since)
        rows = self._ascending(rows, storage.iter)
        if rows:
            self._last_write = rows[-1][0]
            self.write_rows(rows)

    def _ascending(self, rows: list[Row], now: int) -> list[Row]:
        """Rows for iterations already written are joined to the next one that is not: no iteration stands twice."""
        late = [values for iteration, values in rows if iteration <= self._last_write]
        rows = [row for row in rows if row[0] > self._last_write]
        if late:
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
        if not os.path.isfile(self._path) or os.path.getsize(self._path) == 0:
            return
        if start_iter == 0:
            os.replace(self._path, self._path + ".old")
            return
        with open(self._path, encoding="utf-8") as file:
            lines = file.readlines()
        kept = [line for line in lines if _iteration(line) < start_iter]
        if len(kept) == len(lines):
            return
        logger.info("%s: cut back to iteration %d, where this run goes on", self._path, start_iter)
        temporary = f"{self._path}.tmp.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)

    def write_rows(self, rows: Sequence[Row]) -> None:
        if self._file is None:
            os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed in close())
        for iteration, values in rows:
            self._file.write(json.dumps({"iteration": iteration, **dict(sorted(values.items()))}) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _iteration(line: str) -> float:
    """The iteration of a line of metrics; infinite for a line that is not whole."""
    try:
        return json.loads(line)["iteration"] if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


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

    @cached_property
    def _writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # a second of import time

        return SummaryWriter(**self._kwargs)

    def resume(self, start_iter: int) -> None:
        """Have TensorBoard drop the points from ``start_iter`` on that an earlier run wrote."""
        self.close()
        self._kwargs.pop("purge_step", None)
        if start_iter > 0:
            self._kwargs["purge_step"] = start_iter
        self._writer  # noqa: B018 (imported now, not in the middle of training)

    def write(self) -> None:
        storage, since = get_event_storage(), self._seen
        super().write()
        if id(storage) != self._storage_id or self._seen < since:
            since = 0
        for iteration, name, image in storage.images(since):
            self._writer.add_image(name, image, iteration)
        for _, histogram in storage.histograms(since):
            self._writer.add_histogram_raw(**histogram)
        for iteration, name, text in storage.texts(since):
            self._writer.add_text(name, text, iteration)

    def write_rows(self, rows: Sequence[Row]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for iteration, values in rows:
            # One event with all values of the iteration: an event for each would cost ten times as much.
            summary = Summary(value=[Summary.Value(tag=name, simple_value=v) for name, v in values.items()])
            self._writer.file_writer.add_summary(summary, iteration)

    def close(self) -> None:
        if "_writer" in self.__dict__:
            self._writer.close()
            del self.__dict__["_writer"]


@HOOK_REGISTRY.register()
class PeriodicWriter(HookBase):
    """Calls the writers every ``period``, at the last step, and at the end of training.

    It acts at the very end of a step, after every other hook: a metric put by any hook at any event of the step is
    written with that step. Wherever it stands in the list of hooks makes no difference.

    Args:
        writers: the writers.
        period: a duration; 20 iterations by default.
    """

    def __init__(self, writers: Iterable[EventWriter], period: "Duration | int | str" = 20) -> None:
        self._writers = list(writers)
        for writer in self._writers:
            if not isinstance(writer, EventWriter):
                raise TypeError(f"PeriodicWriter takes EventWriters, not {writer!r}")
        self._every = Every(period, at_end=True)
        self._ending = False
        self._seen = 0

    def before_train(self) -> None:
        self._every.start()
        self._ending = False
        self._seen = 0
        for writer in self._writers:
            writer.resume(self.trainer.start_iter)

    def after_step(self) -> None:
        if self._every(self.trainer):
            self.trainer.request_write()

    def after_train(self) -> None:
        self._ending = True
        self.trainer.request_write()

    def on_write(self) -> None:
        try:
            for writer in self._writers:
                writer.write()
        finally:
            if self._ending:
                self._close()
        if self.trainer.listens("after_write"):
            self.trainer.emit("after_write", self._new_metrics())

    def _close(self) -> None:
        errors = []
        for writer in self._writers:
            try:
                writer.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _new_metrics(self) -> Mapping[str, float]:
        rows, self._seen = self.trainer.storage.rows(since=self._seen)
        metrics: dict[str, float] = {}
        for _, values in rows:
            metrics |= values
        return metrics
