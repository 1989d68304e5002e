"""``TrackerWriter``: what writers to experiment trackers have in common."""

import errno
import importlib.util
import json
import logging
import os
import sys
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ...config import ConfigError
from ...config.errors import first_line
from ...config.files.atomic import WriteError, replace_text
from ...config.files.run_folder import claim, is_in_run_folder
from ..common.rng import preserve_rng
from ..storage.event_storage import Row
from .background import Background
from .base import EndOfRun
from .hyperparameters import plain
from .media_writer import MediaWriter, Medium

__all__ = ["TrackerError", "TrackerWriter"]

logger = logging.getLogger(__name__)

_MAX_UNDELIVERED = 10_000


class TrackerError(WriteError):
    """A tracker could not be written to."""

    def __init__(self, writer: "TrackerWriter", cause: BaseException) -> None:
        super().__init__(errno.EIO, f"{type(cause).__name__}: {first_line(cause)}", type(writer).__name__)

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror} (metrics.json is not affected; see CHECKPOINT.ON_ERROR)"


class TrackerWriter(MediaWriter):
    """Writes a run to an experiment tracker. A subclass defines :meth:`start`, :meth:`log` and :meth:`end`.

    A thread of its own delivers, so that neither steps nor checkpoints wait for a network. Any error of the tracker is
    handled like that of a file that cannot be written: rows wait in memory, are retried, and then
    ``CHECKPOINT.ON_ERROR`` decides. Rows that are not delivered are saved in checkpoints.

    A resumed run continues the tracker's run. Its id is in the checkpoint, and in a file in the run's folder, which a
    run killed before its first checkpoint has, too. What the tracker has already is not sent again.

    Args:
        cfg: the config, or any dict of hyperparameters.
        output_dir: the run's folder.
        window_size: see :class:`RowWriter`.
        groups: see :class:`MediaWriter`.
        run_id: id of the tracker's run. Default: that of the run that is resumed, or a new one.
        upload_best: upload the best checkpoint (``CHECKPOINT.BEST``) at the end of the run.

    Raises:
        ConfigError: a package is not installed; or ``upload_best`` is set, and the config keeps no best checkpoint.
    """

    packages: tuple[str, ...] = ()
    """Modules that must be installed."""
    extra = ""
    """Name of hookline's extra that installs them."""

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        output_dir: str = ".",
        window_size: int = 20,
        groups: bool = True,
        run_id: str | None = None,
        upload_best: bool = False,
    ) -> None:
        super().__init__(window_size, groups)
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"{type(self).__name__} needs {package}, which is not installed: "
                    f"pip install 'hookline[{self.extra}]'"
                )
        self.config = plain(cfg or {})
        self.output_dir = output_dir
        # Names the tracker's run if no name is given.
        self._folder_name = os.path.basename(os.path.abspath(output_dir)) if output_dir != "." else None
        if upload_best and not self.config.get("CHECKPOINT", {"BEST": {"METRIC": "any"}})["BEST"]["METRIC"]:
            raise ConfigError(f"upload_best of {type(self).__name__} needs CHECKPOINT.BEST.METRIC, which is empty")
        self._upload_best = upload_best
        self._given_id = run_id
        self.run_id: str | None = run_id
        self._started = False
        self._sent = self._recorded = -1  # the last iteration that the tracker has, and that the file knows of
        self._skip_until = -1  # the tracker has these iterations from an earlier process
        # The tracker's thread removes from the left; others only append.
        self._queue: deque[Row | Medium] = deque()
        self._background = Background(max_jobs=sys.maxsize, delay=0.0)

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def start(self, run_id: str | None) -> str:
        """Start a run of the tracker, or continue ``run_id``, and write :attr:`config` as its hyperparameters.

        Returns:
            The run's id.
        """

    @abstractmethod
    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        """Send the metrics of one iteration."""

    def log_image(self, iteration: int, name: str, image: Any) -> None:
        """Send an image: a uint8 array of shape (H, W, 3) or (H, W)."""

    def log_histogram(self, iteration: int, name: str, counts: Sequence[float], edges: Sequence[float]) -> None:
        """Send a histogram: ``edges`` has one entry more than ``counts``."""

    def log_text(self, iteration: int, name: str, text: str) -> None:
        """Send a text."""

    def upload(self, path: str) -> None:
        """Send the best checkpoint, a file or a folder."""

    @abstractmethod
    def end(self, how: EndOfRun) -> None:
        """End the tracker's run."""

    # ------------------------------------------------------------------ the run

    def resume(self, start_iter: int) -> None:
        super().resume(start_iter)
        record = self._read_record()
        self.run_id = self._given_id or record.get("run_id") or (self.run_id if start_iter else None)
        self._sent = self._skip_until = self._recorded = int(record.get("sent", -1))
        if not start_iter:
            self._queue.clear()
        with preserve_rng():
            self._start()

    def finish(self, how: EndOfRun) -> None:
        if not self._started:
            return
        self._started = False
        with self._errors():
            if self._upload_best and how != "interrupted":
                self._upload()
            self.end(how)

    def state_dict(self) -> dict[str, Any]:
        rows = [[*entry] for entry in self._queue.copy() if not isinstance(entry, Medium)]
        return {**super().state_dict(), "run_id": self.run_id, "undelivered": rows}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.run_id = state_dict["run_id"]
        self._queue = deque((iteration, dict(values)) for iteration, values in state_dict["undelivered"])

    def _start(self) -> None:
        if self._started:
            return
        with self._errors():
            self.run_id = self.start(self.run_id)
        self._started = True
        self._write_record()

    def _upload(self) -> None:
        for name in ("model_best.pth", "model_best"):
            path = os.path.join(self.output_dir, name)
            if os.path.exists(path):
                self.upload(path)
                return
        logger.warning("%s: there is no best checkpoint in %s to upload", type(self).__name__, self.output_dir)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn any error of the tracker into a :class:`TrackerError`."""
        try:
            yield
        except (ConfigError, WriteError):
            raise
        except Exception as error:
            raise TrackerError(self, error) from error

    # ------------------------------------------------------------------ the run's id in its folder

    @property
    def _record_path(self) -> str:
        return os.path.join(self.output_dir, f"{self.extra or type(self).__name__}_run.json")

    def _read_record(self) -> dict[str, Any]:
        if not is_in_run_folder(self._record_path):
            return {}  # another run may have left it
        try:
            with open(self._record_path, encoding="utf-8") as file:
                record = json.load(file)
        except (OSError, ValueError):
            return {}
        known = isinstance(record, dict) and (self._given_id in (None, record.get("run_id")))
        return record if known else {}

    def _write_record(self) -> None:
        self._recorded = self._sent
        if is_in_run_folder(self._record_path):
            claim(self._record_path)
            replace_text(self._record_path, json.dumps({"run_id": self.run_id, "sent": self._sent}) + "\n")

    # ------------------------------------------------------------------ delivery

    def job(self, rows: list[Row], media: Sequence[Medium]) -> Callable[[], None]:
        self._queue.extend(rows)
        self._queue.extend(media)
        return self._request_delivery

    def _request_delivery(self) -> None:
        """Deliver soon. Raises the error of the last delivery."""
        self._background.submit(self._deliver)

    def _deliver(self) -> None:
        try:
            self._start()
            while self._queue:
                entry = self._queue[0]
                iteration = entry.iteration if isinstance(entry, Medium) else entry[0]
                if iteration > self._skip_until:
                    with self._errors():
                        self._send(entry)
                self._queue.popleft()
        except TrackerError:
            if len(self._queue) > _MAX_UNDELIVERED:
                logger.error("%s: dropping the oldest rows, to limit memory", type(self).__name__)
                while len(self._queue) > _MAX_UNDELIVERED:
                    self._queue.popleft()
            raise
        finally:
            if self._sent != self._recorded:
                self._write_record()

    def _send(self, entry: Row | Medium) -> None:
        if not isinstance(entry, Medium):
            self.log(*entry)
            self._sent = max(self._sent, entry[0])
            return
        kind, iteration, name, data = entry
        if kind == "image":
            self.log_image(iteration, name, _pixels(data))
        elif kind == "histogram":
            self.log_histogram(iteration, name, *_bins(data))
        else:
            self.log_text(iteration, name, data)
        self._sent = max(self._sent, iteration)

    def close(self) -> None:
        """Deliver what is left, and end the thread. :meth:`finish` ends the tracker's run."""
        with suppress(OSError):
            self._background.drain()
        if self._queue:
            self._background.submit(self._deliver)
        self._background.close()


def _pixels(image: Any) -> Any:
    """Return a (3, H, W) or (1, H, W) tensor, uint8 or float in [0, 1], as an array; see ``log_image``."""
    image = image.cpu()
    if image.dtype.is_floating_point:
        image = (image.float().clamp(0, 1) * 255).round()
    array = image.byte().numpy()
    return array[0] if array.shape[0] == 1 else array.transpose(1, 2, 0)


def _bins(data: Mapping[str, Any], most: int = 500) -> tuple[list[float], list[float]]:
    """Return counts and edges of a histogram, with at most ``most`` bins: neighbours are added up."""
    counts, edges = list(data["bucket_counts"]), [data["min"], *data["bucket_limits"]]
    together = -(-len(counts) // most)
    sums = [sum(counts[i : i + together]) for i in range(0, len(counts), together)]
    return sums, [*edges[:-1:together], edges[-1]]
