"""TensorBoard event files."""

import io
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from ...config.files.run_folder import claim
from ...config.yaml_files import dump_text
from ..event_storage import Row
from .base import WRITER_REGISTRY, MediaWriter, Medium
from .files import AppendFile

__all__ = ["TensorboardXWriter", "flatten", "plain"]


# Charts of TensorBoard's page "Custom Scalars": each with the curves whose names match one of the patterns.
_CHARTS = {
    "overview": {
        "loss: training and test sets": ["Multiline", ["^train/(total_)?loss$", "^eval/.*loss$"]],
        "learning rate": ["Multiline", ["^train/lr"]],
    }
}


@WRITER_REGISTRY.register()
class TensorboardXWriter(MediaWriter):
    """Writes scalars, images, histograms and texts to TensorBoard event files.

    At the start of a run it also writes the config (as a text, and as hyperparameters for the page "HParams") and the
    charts of the page "Custom Scalars".

    Args:
        log_dir: folder of the event files.
        window_size: see :class:`RowWriter`.
        output_dir: the run's folder, used if ``log_dir`` is not given.
        groups: see :class:`MediaWriter`.
        cfg: the config, or any dict of hyperparameters.
        **kwargs: passed to :class:`torch.utils.tensorboard.SummaryWriter`.
    """

    _kwargs: dict[str, Any] | None = None  # None: a subclass made _writer itself

    def __init__(
        self,
        log_dir: str | None = None,
        window_size: int = 20,
        output_dir: str = ".",
        groups: bool = True,
        cfg: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(window_size, groups)
        self.path = output_dir if log_dir is None else log_dir
        self._kwargs = {"log_dir": self.path, **kwargs}
        self._config = plain(cfg or {})

    @cached_property
    def _writer(self) -> Any:
        if self._kwargs is None:
            raise AttributeError(f"{type(self).__name__} has no _writer: call super().__init__(log_dir), or set it")
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        before = _last_stamp(self.path)
        writer = SummaryWriter(**self._kwargs)
        # Only the first file of a run has this: in a file opened after close() it would hide this run's own points.
        self._kwargs.pop("purge_step", None)
        _write_without_thread(writer, before)
        return writer

    def resume(self, start_iter: int) -> None:
        """Make TensorBoard hide the points that an earlier run wrote from ``start_iter`` on."""
        super().resume(start_iter)
        if self._kwargs is None:
            return
        self.close()
        # Also in the first run of a folder: TensorBoard ignores the first mark that it reads.
        self._kwargs["purge_step"] = self._first
        events = self._writer.file_writer  # imports it now, not during training
        if self._first:
            return
        from torch.utils.tensorboard.summary import custom_scalars, hparams

        if self._groups:
            events.add_summary(custom_scalars(_CHARTS), 0)
        if self._config:
            indented = dump_text(self._config).replace("\n", "\n    ")  # Markdown shows indented lines as they are
            self._writer.add_text("config", f"    {indented}", 0)
            # Without the other two, which fix the names of metrics, and that the run succeeded.
            events.add_summary(hparams(flatten(self._config), {})[1], 0)

    def job(self, rows: list[Row], media: Sequence[Medium]) -> Callable[[], None]:
        now, added = time.time(), False

        def write() -> None:
            nonlocal added
            if not added:
                self._add(rows, media, now)
                added = True
            self._writer.flush()  # after an OSError the events wait for the next flush

        return write

    def _add(self, rows: Sequence[Row], media: Sequence[Medium], now: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        for iteration, values in rows:
            # One event per iteration: one per value costs ten times as much.
            event = Event()
            for name, value in values.items():
                event.summary.value.add(tag=name, simple_value=value)
            self._writer.file_writer.add_event(event, iteration, now)
        for kind, iteration, name, data in media:
            if kind == "image":
                self._writer.add_image(name, data, iteration, now)
            elif kind == "histogram":
                self._writer.add_histogram_raw(**{**data, "global_step": iteration}, walltime=now)
            else:
                self._writer.add_text(name, data, iteration, now)

    def sync(self) -> None:
        if self._kwargs is None:
            self._writer.flush()
        elif "_writer" in self.__dict__:
            event_writer = self._writer.file_writer.event_writer
            if isinstance(event_writer, _EventFile):
                event_writer.sync()

    def close(self) -> None:
        writer = self.__dict__.get("_writer")
        if writer is not None:
            writer.close()
        if self._kwargs is not None:  # a SummaryWriter reopens itself
            self.__dict__.pop("_writer", None)


_EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d+)\.")


def _last_stamp(folder: str) -> int | None:
    """Return the greatest time stamp in the names of a folder's event files; None if there are none."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    stamps = [int(match[1]) for name in names if (match := _EVENT_FILE.match(name))]
    return max(stamps, default=None)


class _EventFile:
    """Replaces tensorboard's ``EventFileWriter``, without its thread.

    That thread opens and closes the file for each event, and competes with the training thread. Here events are
    collected in memory, and :meth:`flush` appends them to the file, all or none.

    Args:
        path: an existing file; events are appended.
        log_dir: the folder that :meth:`get_logdir` returns.
    """

    def __init__(self, path: str, log_dir: str) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._file = AppendFile(path)
        self._buffer = io.BytesIO()
        self._records = RecordWriter(self._buffer)
        self._log_dir = log_dir
        self._lock = threading.Lock()

    def get_logdir(self) -> str:
        return self._log_dir

    def add_event(self, event: Any) -> None:
        with self._lock:
            self._records.write(event.SerializeToString())

    def flush(self) -> None:
        with self._lock:
            if self._buffer.tell():
                self._file.write(self._buffer.getvalue())
                self._buffer.seek(0)
                self._buffer.truncate()

    def sync(self) -> None:
        self.flush()
        with self._lock:
            self._file.sync()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            with self._lock:
                self._file.close()


def _write_without_thread(writer: Any, before: int | None) -> None:
    """Make a SummaryWriter write without its thread. Does nothing if its file is not local.

    Args:
        writer: the SummaryWriter.
        before: greatest time stamp of the folder's other files. TensorBoard reads files in the order of their names,
            which hold the time in seconds. If the earlier run has just ended, or its clock was ahead, its stamp may
            not be smaller; the new file is then renamed.
    """
    event_writer = writer.file_writer.event_writer
    path = getattr(event_writer, "_file_name", "")
    if not os.path.isfile(path):
        return
    event_writer.close()  # writes what it has, such as purge_step
    folder, name = os.path.split(path)
    match = _EVENT_FILE.match(name)
    if match and before is not None and int(match[1]) <= before:
        renamed = os.path.join(folder, f"{name[: match.start(1)]}{before + 1:010d}{name[match.end(1) :]}")
        os.rename(path, renamed)
        path = renamed
    claim(path, keep=True)
    writer.file_writer.event_writer = _EventFile(path, event_writer.get_logdir())


def plain(value: Any) -> Any:
    """Return a deep copy of a config: dicts, lists, numbers, strings, bools and None. Others become strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if type(value) in (bool, int, float, str, type(None)) else str(value)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, int | float | str]:
    """Return a config by full keys, such as ``{"SOLVER.BASE_LR": 0.1}``. Lists, bools and None become strings."""
    flat: dict[str, int | float | str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if type(value) in (int, float, str) else str(value)
    return flat
