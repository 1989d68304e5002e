"""The storage that metrics travel through, from whoever measures them to the writers.

Putting a metric appends to a list; nothing is converted, smoothed or copied from a device until somebody reads.
"""

import logging
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from ...config import ConfigError, suggest
from .history_buffer import HistoryBuffer

__all__ = ["EventStorage", "Row", "get_event_storage", "has_event_storage"]

logger = logging.getLogger(__name__)

Row = tuple[int, dict[str, float]]
"""One line of metrics: the iteration, and the values by name."""

# A plain list and not a context variable, so that threads started by a run see its storage.
_STORAGES: list["EventStorage"] = []

# Reading early when this many puts are waiting keeps memory bounded in a run without writers.
_MAX_PENDING = 4096
# Values that no writer has asked for yet; old ones go when a run has no writers.
_MAX_POINTS = 4096
_MAX_SAVED_POINTS = 256
_MAX_IMAGES = 64


def get_event_storage() -> "EventStorage":
    """The storage of the run in progress.

    Raises:
        RuntimeError: outside of ``with EventStorage(...)``, that is, when nothing is training.
    """
    if not _STORAGES:
        raise RuntimeError("get_event_storage() works inside 'with EventStorage(...)', so while a trainer trains")
    return _STORAGES[-1]


def has_event_storage() -> bool:
    """Whether a storage is active."""
    return bool(_STORAGES)


class EventStorage:
    """Collects scalars, images, histograms and texts of a run, by name and iteration.

    A scalar put with ``smoothing_hint`` (a loss, a time: noisy, put at every step) is reported by writers as the
    median over a window; one without (an accuracy, a learning rate) as it is. Names may hold slashes: writers
    group by what stands before the first one.

    Args:
        start_iter: the iteration to start from.
    """

    def __init__(self, start_iter: int = 0) -> None:
        self._iter = int(start_iter)
        self._prefix = ""
        # Puts that nobody has read yet: (iteration, values, smoothing hint), in the order they came.
        self._pending: list[tuple[int, dict[str, Any], bool]] = []
        self._on_device = False  # whether some of them are tensors on a device
        self._history: dict[str, HistoryBuffer] = {}
        self._smoothing_hints: dict[str, bool] = {}
        # Every value gets a number, so that a writer can ask for what came since its last turn.
        self._seq = 0
        self._last_seq: dict[str, int] = {}
        self._medians: dict[str, tuple[Any, float]] = {}
        self._rows: tuple[Any, list[Row]] = (None, [])
        # Values in rows of their own, by number: those that came since a reader's last turn are the last ones.
        self._points: list[tuple[int, int, str, float]] = []
        self._images: deque[tuple[int, int, str, torch.Tensor]] = deque(maxlen=_MAX_IMAGES)
        self._histogram_entries: deque[tuple[int, int, dict[str, Any]]] = deque(maxlen=_MAX_IMAGES)
        self._texts: deque[tuple[int, int, str, str]] = deque(maxlen=_MAX_POINTS)
        self.nonfinite: dict[str, int] = {}
        """Names whose value was NaN or infinite, with the first iteration where it was."""
        self.over_ranks: set[str] = set()
        """Names of values that are this rank's part of a mean over ranks, until :meth:`replace` puts that mean."""
        self.loaded = 0
        """The number of the last value that :meth:`load_state_dict` loaded; see :meth:`rows`."""
        self.shared_until = int(start_iter) - 1
        """The last iteration whose values are those of all ranks."""

    # ------------------------------------------------------------------ putting

    def put_scalar(self, name: str, value: Any, smoothing_hint: bool = True, cur_iter: int | None = None) -> None:
        """Add one scalar.

        Args:
            name: of the metric; the active :meth:`name_scope` comes before it.
            value: a number, or a tensor with one element. A tensor on a GPU stays there until somebody reads.
            smoothing_hint: whether writers report the median over a window (True) or the value itself.
            cur_iter: the iteration it belongs to, if not the present one.

        Raises:
            TypeError: ``value`` is not one number; the message names the metric.
            ValueError: the name is "iteration".
        """
        if type(value) is not float:
            value = self._as_scalar(name, value)
        if self._prefix:
            name = self._prefix + name
        elif name == "iteration":
            raise _reserved()
        self._pending.append((self._iter if cur_iter is None else int(cur_iter), {name: value}, smoothing_hint))
        if len(self._pending) >= _MAX_PENDING:
            self._resolve()

    def put_scalars(self, *, smoothing_hint: bool = True, cur_iter: int | None = None, **kwargs: Any) -> None:
        """Add several scalars at once; see :meth:`put_scalar`.

        Example: ``storage.put_scalars(loss=loss, accuracy=0.5)``
        """
        for name, value in kwargs.items():
            if type(value) is not float:
                kwargs[name] = self._as_scalar(name, value)
        if self._prefix:
            kwargs = {self._prefix + name: value for name, value in kwargs.items()}
        elif "iteration" in kwargs:
            raise _reserved()
        self._pending.append((self._iter if cur_iter is None else int(cur_iter), kwargs, smoothing_hint))
        if len(self._pending) >= _MAX_PENDING:
            self._resolve()

    def _as_scalar(self, name: str, value: Any) -> Any:
        """A float; or, for a tensor on a device, a copy of it there, which later changes in place cannot reach."""
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise TypeError(f"metric {name!r} must be one number, not a tensor of shape {tuple(value.shape)}")
            if value.device.type == "cpu":
                return value.item()
            self._on_device = True
            return value.detach().clone().reshape(())
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metric {name!r} must be a number or a tensor with one element, not {value!r}") from error

    def put_image(self, img_name: str, img_tensor: Any) -> None:
        """Add an image for the writers that show images.

        Args:
            img_name: its name.
            img_tensor: of shape (3, H, W) or (1, H, W), uint8 in [0, 255] or float in [0, 1], RGB.
        """
        image = torch.as_tensor(img_tensor).detach().clone()
        self._images.append((self._next_seq(), self._iter, self._prefix + img_name, image))

    def put_histogram(self, hist_name: str, hist_tensor: torch.Tensor, bins: int = 1000) -> None:
        """Add the histogram of a tensor's values.

        Args:
            hist_name: its name.
            hist_tensor: values of any shape; not kept, only counted.
            bins: number of equal bins between the least and the greatest value.
        """
        values = hist_tensor.detach().flatten().float()
        low, high = values.min().item(), values.max().item()
        counts = torch.histc(values, bins)
        edges = torch.linspace(low, high, steps=bins + 1)
        hist = {
            "tag": self._prefix + hist_name,
            "min": low,
            "max": high,
            "num": values.numel(),
            "sum": values.sum().item(),
            "sum_squares": (values**2).sum().item(),
            "bucket_limits": edges[1:].tolist(),
            "bucket_counts": counts.tolist(),
            "global_step": self._iter,
        }
        self._histogram_entries.append((self._next_seq(), self._iter, hist))

    def put_text(self, name: str, text: str) -> None:
        """Add a text, such as a sample that a language model wrote."""
        self._texts.append((self._next_seq(), self._iter, self._prefix + name, text))

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Within it ``name/`` stands before every name put; scopes nest."""
        outer = self._prefix
        self._prefix = outer + name.rstrip("/") + "/"
        try:
            yield
        finally:
            self._prefix = outer

    # ------------------------------------------------------------------ iteration

    @property
    def iter(self) -> int:
        """The present iteration; within a step the same as the trainer's."""
        return self._iter

    @iter.setter
    def iter(self, value: int) -> None:
        self._iter = int(value)

    @property
    def iteration(self) -> int:
        """The same as :attr:`iter`, under the name it had in early detectron2."""
        return self._iter

    def step(self) -> None:
        """Advance :attr:`iter` by one, for loops of one's own; trainers set it."""
        self._iter += 1

    # ------------------------------------------------------------------ reading

    def history(self, name: str) -> HistoryBuffer:
        """The window of values of one metric.

        Raises:
            KeyError: nothing was put under that name; the message lists the names there are.
        """
        self._resolve()
        if name not in self._history:
            there = ", ".join(self._history) or "none yet"
            raise KeyError(f"no metric {name!r} among those put ({there}){suggest(name, self._history)}")
        return self._history[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        """All windows, by name."""
        self._resolve()
        return self._history

    def peek(self, name: str) -> float | None:
        """The last value of a scalar that somebody has read already; None if there is none.

        Waits for nothing, and may be called by another thread than the one that trains.
        """
        history = self._history.get(name)
        return history.latest() if history else None

    def latest(self) -> dict[str, tuple[float, int]]:
        """The last value of every scalar and the iteration it was put at."""
        self._resolve()
        return {name: (history.latest(), history.latest_iter()) for name, history in self._history.items()}

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """Like :meth:`latest`, with the median over the last ``window_size`` iterations where smoothing is hinted."""
        self._resolve()
        return {name: (self._smoothed(name, window_size), h.latest_iter()) for name, h in self._history.items()}

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """How many values of ``name`` were put in the last ``window_size`` iterations in which it was put."""
        history = self.history(name)
        return history.count_since(history.latest_iter() - window_size)

    def smoothing_hints(self) -> dict[str, bool]:
        """The smoothing hint of every scalar."""
        self._resolve()
        return self._smoothing_hints

    def rows(self, window_size: int = 20, since: int = 0) -> tuple[list[Row], int]:
        """What came since a reader's last turn, as rows.

        A smoothed metric appears once, as its median, at the iteration it was last put at. Of an unsmoothed one
        every value appears, except that a series put at each single iteration (a learning rate) is sampled: of
        a run of consecutive iterations the last is reported.

        Args:
            window_size: iterations the medians run over.
            since: the number returned by the reader's last call; 0 at first.

        Returns:
            The rows with ascending iterations, and the number to pass next time.
        """
        self._resolve()
        key = (window_size, since, self._seq)
        if key == self._rows[0]:  # another writer asked for the same a moment ago
            return self._rows[1], self._seq
        rows: dict[int, dict[str, float]] = {}
        for _, iteration, name, value in self._points[bisect_left(self._points, (since + 1,)) :]:
            rows.setdefault(iteration, {})[name] = value
        for name, seq in self._last_seq.items():
            if seq > since:
                iteration = self._history[name].latest_iter()
                rows.setdefault(iteration, {})[name] = self._smoothed(name, window_size)
        self._rows = (key, sorted(rows.items()))
        return self._rows[1], self._seq

    def images(self, since: int = 0) -> list[tuple[int, str, torch.Tensor]]:
        """(iteration, name, image) of the images that came after number ``since``; see :meth:`rows`."""
        return [entry[1:] for entry in self._images if entry[0] > since]

    def histograms(self, since: int = 0) -> list[tuple[int, dict[str, Any]]]:
        """(iteration, parameters of SummaryWriter.add_histogram_raw) of the histograms after number ``since``."""
        return [entry[1:] for entry in self._histogram_entries if entry[0] > since]

    def texts(self, since: int = 0) -> list[tuple[int, str, str]]:
        """(iteration, name, text) of the texts that came after number ``since``."""
        return [entry[1:] for entry in self._texts if entry[0] > since]

    def clear_images(self) -> None:
        """Forget all images, for writers of one's own; hookline's keep their place instead."""
        self._images.clear()

    def clear_histograms(self) -> None:
        """Forget all histograms; see :meth:`clear_images`."""
        self._histogram_entries.clear()

    @property
    def _vis_data(self) -> list[tuple[str, torch.Tensor, int]]:
        """Images as detectron2's writers read them; so are :attr:`_histograms`."""
        return [(name, image, iteration) for _, iteration, name, image in self._images]

    @property
    def _histograms(self) -> list[dict[str, Any]]:
        return [parameters for _, _, parameters in self._histogram_entries]

    # ------------------------------------------------------------------ several ranks

    def unshared(self, name: str) -> list[tuple[float, int]]:
        """This rank's values of a metric after :attr:`shared_until`, each with its iteration."""
        history = self.histories().get(name)
        return [] if history is None else history.tail(history.count_since(self.shared_until))

    def replace(self, name: str, values: Mapping[int, float]) -> None:
        """Put other values, by iteration, in the place of the latest ones of a metric.

        Raises:
            KeyError: nothing was put under that name.
        """
        self.history(name).replace(values)
        self._last_seq[name] = self._next_seq()  # what was made of the old ones is not to be used again
        if self.nonfinite.get(name) in values:
            del self.nonfinite[name]
        bad = [iteration for iteration, value in values.items() if not math.isfinite(value)]
        if bad:
            self.nonfinite.setdefault(name, min(bad))

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The windows of the metrics, and what writers have not taken yet; images and the like are left out.

        So is ``eta_seconds``, which writing puts: a run that is stopped writes once more than one that goes on.
        """
        self._resolve()
        names = [name for name in self._history if name != "eta_seconds"]
        return {
            "histories": {name: self._history[name].state_dict() for name in names},
            "smoothing_hints": {name: self._smoothing_hints[name] for name in names},
            "seq": self._seq,
            "last_seq": {name: self._last_seq[name] for name in names},
            # Writers have taken all but the latest: those since the last writing.
            "points": [point for point in self._points[-_MAX_SAVED_POINTS:] if point[2] != "eta_seconds"],
        }

    def media_state(self, since: int) -> dict[str, Any]:
        """The images, histograms and texts after number ``since``, as plain data: for the state of a writer."""
        return {kind: [list(one) for one in entries if one[0] > since] for kind, entries in self._media().items()}

    def restore_media(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`media_state` returned; what another writer has restored already is left out."""
        for kind, entries in self._media().items():
            known = {entry[0] for entry in entries}
            restored = [tuple(one) for one in state.get(kind, ()) if one[0] not in known]
            merged = sorted([*entries, *restored], key=lambda entry: entry[0])
            entries.clear()
            entries.extend(merged)

    def _media(self) -> dict[str, deque[Any]]:
        return {"images": self._images, "histograms": self._histogram_entries, "texts": self._texts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of an earlier run's storage.

        Raises:
            ConfigError: it is not such a state.
        """
        try:
            for name, state in state_dict["histories"].items():
                self._history[name] = HistoryBuffer()
                self._history[name].load_state_dict(state)
            self._smoothing_hints = dict(state_dict["smoothing_hints"])
            self._seq = self.loaded = int(state_dict["seq"])
            self._last_seq = dict(state_dict["last_seq"])
            self._points = sorted(tuple(point) for point in state_dict["points"])
        except Exception as error:  # of any kind, as the state happens to be
            raise ConfigError(f"the metrics in the checkpoint cannot be loaded ({type(error).__name__})") from error

    # ------------------------------------------------------------------ inside

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _smoothed(self, name: str, window_size: int) -> float:
        history = self._history[name]
        if not self._smoothing_hints[name]:
            return history.latest()
        key = (self._last_seq[name], window_size)
        if self._medians.get(name, (None, 0.0))[0] != key:  # several writers ask for the same
            count = max(1, history.count_since(history.latest_iter() - window_size))
            self._medians[name] = (key, history.median(count))
        return self._medians[name][1]

    def _resolve(self) -> None:
        """Bring the pending values over from their devices, in one copy each, and file them."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        if self._on_device:
            self._on_device = False
            _fetch_tensors(pending)
        # By name first, then each name's values in one go: most of them were put in every step.
        series: dict[str, tuple[list[float], list[int]]] = {}
        for iteration, values, smoothing_hint in pending:
            for name, value in values.items():
                new = series.get(name)
                if new is None:
                    new = series[name] = ([], [])
                    self._smoothing_hints[name] = smoothing_hint
                new[0].append(value)
                new[1].append(iteration)
        for name, (new_values, new_iters) in series.items():
            self._file(name, new_values, new_iters)

    def _file(self, name: str, values: list[float], iters: list[int]) -> None:
        history = self._history.get(name)
        if history is None:
            history = self._history[name] = HistoryBuffer()
        if not self._smoothing_hints[name]:
            self._file_single_values(name, history, values, iters)
        history.extend(values, iters)
        self._last_seq[name] = self._next_seq()
        total = sum(values)
        if total - total != 0.0:  # true of NaN and infinities only
            bad = (iteration for value, iteration in zip(values, iters, strict=True) if not math.isfinite(value))
            self.nonfinite.setdefault(name, next(bad, iters[-1]))

    def _file_single_values(self, name: str, history: HistoryBuffer, values: list[float], iters: list[int]) -> None:
        """A value that is not one of a series put at every iteration stands for itself, in a row of its own."""
        first = iters[0]
        in_series = not len(history) or first - 1 <= history.latest_iter()
        if in_series and iters == list(range(first, first + len(iters))):
            return
        before = [] if not len(history) else [(history.latest(), history.latest_iter())]
        points = [*before, *zip(values, iters, strict=True)]
        for index, ((value, iteration), (_, following)) in enumerate(pairwise(points)):
            if iteration < following - 1:
                seq = self._last_seq[name] if before and index == 0 else self._next_seq()
                insort(self._points, (seq, iteration, name, value))
        if len(self._points) > 2 * _MAX_POINTS:
            del self._points[:-_MAX_POINTS]

    def __enter__(self) -> "EventStorage":
        _STORAGES.append(self)
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        # By identity: the storage of a run that ended out of order is not popped for another's.
        for index in range(len(_STORAGES) - 1, -1, -1):
            if _STORAGES[index] is self:
                del _STORAGES[index]
                break


def _reserved() -> ValueError:
    return ValueError('a metric cannot be named "iteration", which is the number of the row it stands in: rename it')


def _fetch_tensors(pending: list[tuple[int, dict[str, Any], bool]]) -> None:
    """Replace the tensors in ``pending`` by numbers, unrounded: one stack and one copy for each device and type."""
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str]]] = {}
    for _, values, _ in pending:
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                alike.setdefault((value.device, value.dtype), []).append((values, name))
    for places in alike.values():
        numbers = torch.stack([values[name] for values, name in places]).tolist()
        for (values, name), number in zip(places, numbers, strict=True):
            values[name] = float(number)


def flatten_names(results: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested results into ``{"a/b": value}``."""
    flat: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            flat.update(flatten_names(value, f"{prefix}{name}/"))
        else:
            flat[prefix + name] = value
    return flat
