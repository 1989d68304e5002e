"""TensorBoard event files."""

import glob
import io
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from ...config import CfgNode, get_cfg
from ...config.yaml_files import dump_text
from ..evaluation import flatten_names
from .base import WRITER_REGISTRY, MediaWriter
from .files import AppendFile


@WRITER_REGISTRY.register()
class TensorboardXWriter(MediaWriter):
    """Writes scalars, images, histograms and texts to TensorBoard event files.

    At the start of a run it also writes the config: all of it as a text, and the keys that differ from the defaults as
    hyperparameters for the page "HParams", without objects and ``OUTPUT_DIR``.

    Args:
        log_dir: folder of the event files.
        window_size: see :class:`RowWriter`.
        output_dir: used if ``log_dir`` is not given. Default: the run's folder.
        cfg: the config, or any dict of hyperparameters.
        **kwargs: passed to :class:`torch.utils.tensorboard.SummaryWriter`.
    """

    _kwargs: dict[str, Any] | None = None  # None: a subclass made _writer itself
    _is_placed = True
    _events: "_EventFile | None" = None

    def __init__(
        self,
        log_dir: str | None = None,
        window_size: int = 20,
        output_dir: str | None = None,
        cfg: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(window_size)
        self._is_placed = log_dir is not None or output_dir is not None
        self.path = (output_dir or ".") if log_dir is None else log_dir
        self._kwargs = {"log_dir": self.path, **kwargs}
        self._config = plain(cfg or {})
        changed = cfg.diff(get_cfg()) if isinstance(cfg, CfgNode) else {}
        kept = {key: new for key, (_, new) in changed.items() if key != "OUTPUT_DIR" and "<object " not in str(new)}
        self._hparams = kept if changed else self._config

    def use_folder(self, folder: str) -> None:
        if not self._is_placed and self._kwargs is not None:
            self.path = self._kwargs["log_dir"] = folder

    @cached_property
    def _writer(self) -> Any:
        if self._kwargs is None:
            raise AttributeError(f"{type(self).__name__} has no _writer: call super().__init__(log_dir), or set it")
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        before = _event_files(self.path)
        writer: Any = SummaryWriter(**self._kwargs)
        # Only the first file of a run has this: in a file opened after close() it would hide this run's own points.
        self._kwargs.pop("purge_step", None)
        if new := _event_files(self.path) - before:  # none in a folder that is not local
            writer.file_writer.event_writer.close()  # writes what it has, such as purge_step
            self._events = writer.file_writer.event_writer = _EventFile(new.pop())
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
        if self._config:
            from torch.utils.tensorboard.summary import hparams

            indented = dump_text(self._config).replace("\n", "\n    ")  # Markdown shows indented lines as they are
            self._writer.add_text("config", f"    {indented}", 0)
            # Without the other two, which fix the names of metrics, and that the run succeeded.
            events.add_summary(hparams(flatten(self._hparams), {})[1], 0)

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        # One event per iteration: one per value costs ten times as much.
        event = Event()
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._writer.file_writer.add_event(event, iteration)

    def log_image(self, iteration: int, name: str, image: torch.Tensor) -> None:
        self._writer.add_image(name, image, iteration)

    def log_histogram(self, iteration: int, name: str, histogram: dict[str, Any]) -> None:
        self._writer.add_histogram_raw(**{**histogram, "global_step": iteration})

    def log_text(self, iteration: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, iteration)

    def deliver(self) -> None:
        super().deliver()
        if "_writer" in self.__dict__:
            self._writer.flush()  # after an OSError the events wait for the next flush

    def sync(self) -> None:
        if self._events is not None:
            self._events.sync()

    def close(self) -> None:
        writer = self.__dict__.get("_writer")
        if writer is not None:
            writer.close()
        if self._kwargs is not None:  # a SummaryWriter reopens itself
            self.__dict__.pop("_writer", None)


class _EventFile(AppendFile):
    """Has the methods of tensorboard's ``EventFileWriter``, whose thread opens and closes the file for each event.

    Events are collected in memory, and :meth:`flush` appends them to the file, all or none.

    Args:
        path: an existing file; events are appended.
    """

    def __init__(self, path: str) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        super().__init__(path)
        self._buffer = io.BytesIO()
        self._records = RecordWriter(self._buffer)

    def add_event(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def get_logdir(self) -> str:
        return os.path.dirname(self.path)

    def flush(self) -> None:
        if self._buffer.tell():
            self.write(self._buffer.getvalue())
            self._buffer.seek(0)
            self._buffer.truncate()

    def sync(self) -> None:
        self.flush()
        super().sync()


def _event_files(folder: str) -> set[str]:
    """Return the event files of this process in a folder."""
    return {*glob.glob(os.path.join(glob.escape(folder), f"events.out.tfevents.*.{os.getpid()}.*"))}


def plain(value: object) -> Any:
    """Return a deep copy of a config: dicts, lists, numbers, strings, bools and None. Others become strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if type(value) in (bool, int, float, str, type(None)) else str(value)


def flatten(config: Mapping[str, object]) -> dict[str, int | float | str]:
    """Return a config by full keys, such as ``{"SOLVER.BASE_LR": 0.1}``. Lists, bools and None become strings."""
    values = flatten_names(config, separator=".").items()
    return {key: value if type(value) in (int, float, str) else str(value) for key, value in values}
