"""``EventStorage``: how metrics get from steps and hooks to writers.

Putting a metric appends it to a list. Values are copied from the GPU, smoothed and sorted only when they are read.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from ...config import ConfigError, suggest
from .history_buffer import HistoryBuffer
from .media import MediaStorage
from .pending import as_scalar, by_name, fetch_tensors

__all__ = ["EventStorage", "Row", "get_event_storage", "has_event_storage"]

Row = tuple[int, dict[str, float]]
"""One line of metrics: the iteration, and the values by name."""

# Not a context variable, so that threads of a run see its storage.
_STORAGES: list["EventStorage"] = []

# Limits of memory in a run without writers: values not read yet, values in rows of their own.
_MAX_PENDING = 4096
_MAX_POINTS = 4096
_MAX_SAVED_POINTS = 256


def get_event_storage() -> "EventStorage":
    """Return the storage of the current run.

    Raises:
        RuntimeError: nothing is training: there is no ``with EventStorage(...)`` around this call.
    """
    if not _STORAGES:
        raise RuntimeError("get_event_storage() works inside 'with EventStorage(...)', so while a trainer trains")
    return _STORAGES[-1]


def has_event_storage() -> bool:
    """Return whether a run is in progress."""
    return bool(_STORAGES)


class EventStorage(MediaStorage):
    """Collects the scalars, images, histograms and texts of a run, by name and iteration.

    Writers report a scalar that was put with ``smoothing_hint=True`` (a loss: noisy, put at every step) as its median
    over a window, one with ``smoothing_hint=False`` (an accuracy, a learning rate) as it is. Names may contain slashes.
    Writers group metrics by what comes before the first slash.

    Args:
        start_iter: the first iteration.
    """

    def __init__(self, start_iter: int = 0) -> None:
        super().__init__(start_iter)
        # Values that nobody has read yet: (iteration, values, smoothing hint), in the order they were put.
        self._pending: list[tuple[int, dict[str, Any], bool]] = []
        self._on_device = False  # whether some of them are tensors on a device
        self._history: dict[str, HistoryBuffer] = {}
        self._smoothing_hints: dict[str, bool] = {}
        self._last_seq: dict[str, int] = {}
        self._medians: dict[str, tuple[Any, float]] = {}
        self._rows: tuple[Any, list[Row]] = (None, [])
        # Values with a row of their own, in the order of their numbers: (number, iteration, name, value).
        self._points: list[tuple[int, int, str, float]] = []
        self.nonfinite: dict[str, int] = {}
        """The first iteration at which a metric was NaN or infinite, by name."""
        self.over_ranks: set[str] = set()
        """Names of metrics that are averaged over ranks. Until :meth:`replace` they hold this rank's values."""
        self.loaded = 0
        """The number of the last value that :meth:`load_state_dict` loaded; see :meth:`rows`."""
        self.shared_until = int(start_iter) - 1
        """The last iteration whose values are averaged over ranks."""

    # ------------------------------------------------------------------ put

    def put_scalar(self, name: str, value: Any, smoothing_hint: bool = True, cur_iter: int | None = None) -> None:
        """Add a scalar.

        Args:
            name: the metric's name. Active :meth:`name_scope` prefixes are added to it.
            value: a number, or a tensor with one element. A tensor on a GPU stays there until it is read.
            smoothing_hint: whether writers report the median over a window (True) or the value itself.
            cur_iter: the iteration it belongs to. Default: the current one.

        Raises:
            TypeError: ``value`` is not one number.
            ValueError: the name is "iteration".
        """
        if type(value) is not float:
            value = as_scalar(name, value)
            self._on_device |= isinstance(value, torch.Tensor)
        if self._prefix:
            name = self._prefix + name
        elif name == "iteration":
            raise _reserved()
        self._pending.append((self._iter if cur_iter is None else int(cur_iter), {name: value}, smoothing_hint))
        if len(self._pending) >= _MAX_PENDING:
            self._resolve()

    def put_scalars(self, *, smoothing_hint: bool = True, cur_iter: int | None = None, **kwargs: Any) -> None:
        """Add several scalars: ``storage.put_scalars(loss=loss, accuracy=0.5)``. See :meth:`put_scalar`."""
        for name, value in kwargs.items():
            if type(value) is not float:
                kwargs[name] = as_scalar(name, value)
                self._on_device |= isinstance(kwargs[name], torch.Tensor)
        if self._prefix:
            kwargs = {self._prefix + name: value for name, value in kwargs.items()}
        elif "iteration" in kwargs:
            raise _reserved()
        self._pending.append((self._iter if cur_iter is None else int(cur_iter), kwargs, smoothing_hint))
        if len(self._pending) >= _MAX_PENDING:
            self._resolve()

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Add the prefix ``name/`` to every name put inside the block. Scopes nest."""
        outer = self._prefix
        self._prefix = outer + name.rstrip("/") + "/"
        try:
            yield
        finally:
            self._prefix = outer

    @property
    def iter(self) -> int:
        """The current iteration. During a step it equals ``trainer.iter``."""
        return self._iter

    @iter.setter
    def iter(self, value: int) -> None:
        self._iter = int(value)

    @property
    def iteration(self) -> int:
        """Same as :attr:`iter`; its name in early detectron2."""
        return self._iter

    def step(self) -> None:
        """Increase :attr:`iter` by one, in a hand-written loop. A trainer sets :attr:`iter`."""
        self._iter += 1

    # ------------------------------------------------------------------ read

    def history(self, name: str) -> HistoryBuffer:
        """Return the recent values of a metric.

        Raises:
            KeyError: there is no such metric.
        """
        self._resolve()
        if name not in self._history:
            there = ", ".join(self._history) or "none yet"
            raise KeyError(f"no metric {name!r} among those put ({there}){suggest(name, self._history)}")
        return self._history[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        """Return the recent values of all metrics, by name."""
        self._resolve()
        return self._history

    def peek(self, name: str) -> float | None:
        """Return the last value that was read of a metric, or None. Never waits; safe to call from any thread."""
        history = self._history.get(name)
        return history.latest() if history else None

    def latest(self) -> dict[str, tuple[float, int]]:
        """Return the last value of every scalar, and its iteration."""
        self._resolve()
        return {name: (history.latest(), history.latest_iter()) for name, history in self._history.items()}

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """Like :meth:`latest`, but a smoothed scalar is the median of the last ``window_size`` iterations."""
        self._resolve()
        return {name: (self._smoothed(name, window_size), h.latest_iter()) for name, h in self._history.items()}

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """Return how many values of a metric were put in its last ``window_size`` iterations."""
        history = self.history(name)
        return history.count_since(history.latest_iter() - window_size)

    def smoothing_hints(self) -> dict[str, bool]:
        """Return the smoothing hint of every scalar."""
        self._resolve()
        return self._smoothing_hints

    def rows(self, window_size: int = 20, since: int = 0) -> tuple[list[Row], int]:
        """Return what is new since a reader's last call, as rows.

        A smoothed metric appears once: its median, at the last iteration it was put at. Any other metric appears with
        all its values. If it was put at every iteration, like a learning rate, only its last value appears.

        Args:
            window_size: number of iterations that medians cover.
            since: the number that the reader's last call returned; 0 at first.

        Returns:
            The rows by ascending iteration, and the number to pass next time.
        """
        self._resolve()
        key = (window_size, since, self._seq)
        if key == self._rows[0]:  # several writers read the same rows
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

    # ------------------------------------------------------------------ several ranks

    def unshared(self, name: str) -> list[tuple[float, int]]:
        """Return this rank's values of a metric after :attr:`shared_until`, each with its iteration."""
        history = self.histories().get(name)
        return [] if history is None else history.tail(history.count_since(self.shared_until))

    def replace(self, name: str, values: Mapping[int, float]) -> None:
        """Replace the latest values of a metric, given by iteration.

        Raises:
            KeyError: there is no such metric.
        """
        self.history(name).replace(values)
        self._last_seq[name] = self._next_seq()  # discards medians of the old values
        if self.nonfinite.get(name) in values:
            del self.nonfinite[name]
        bad = [iteration for iteration, value in values.items() if not math.isfinite(value)]
        if bad:
            self.nonfinite.setdefault(name, min(bad))

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return recent values of the metrics, and values that writers have not taken yet."""
        self._resolve()
        # Not eta_seconds: an interrupted run writes it once more than an uninterrupted one, so a resume would differ.
        names = [name for name in self._history if name != "eta_seconds"]
        return {
            "histories": {name: self._history[name].state_dict() for name in names},
            "smoothing_hints": {name: self._smoothing_hints[name] for name in names},
            "seq": self._seq,
            "last_seq": {name: self._last_seq[name] for name in names},
            # Writers have taken all points before these.
            "points": [point for point in self._points[-_MAX_SAVED_POINTS:] if point[2] != "eta_seconds"],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ConfigError: ``state_dict`` is not the state of a storage.
        """
        try:
            for name, state in state_dict["histories"].items():
                self._history[name] = HistoryBuffer()
                self._history[name].load_state_dict(state)
            self._smoothing_hints = dict(state_dict["smoothing_hints"])
            self._seq = self.loaded = int(state_dict["seq"])
            self._last_seq = dict(state_dict["last_seq"])
            self._points = sorted(tuple(point) for point in state_dict["points"])
        except Exception as error:  # a damaged state raises any kind of error
            raise ConfigError(f"the metrics in the checkpoint cannot be loaded ({type(error).__name__})") from error

    # ------------------------------------------------------------------ internals

    def _smoothed(self, name: str, window_size: int) -> float:
        history = self._history[name]
        if not self._smoothing_hints[name]:
            return history.latest()
        key = (self._last_seq[name], window_size)
        if self._medians.get(name, (None, 0.0))[0] != key:  # several writers ask for the same median
            count = max(1, history.count_since(history.latest_iter() - window_size))
            self._medians[name] = (key, history.median(count))
        return self._medians[name][1]

    def _resolve(self) -> None:
        """Copy pending values from their devices, in one copy each, and add them to the histories."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        if self._on_device:
            self._on_device = False
            fetch_tensors(pending)
        for name, (values, iters, smoothing_hint) in by_name(pending).items():
            self._smoothing_hints[name] = smoothing_hint
            self._add(name, values, iters)

    def _add(self, name: str, values: list[float], iters: list[int]) -> None:
        history = self._history.get(name)
        if history is None:
            history = self._history[name] = HistoryBuffer()
        if not self._smoothing_hints[name]:
            self._add_points(name, history, values, iters)
        history.extend(values, iters)
        self._last_seq[name] = self._next_seq()
        total = sum(values)
        if total - total != 0.0:  # only if a value is NaN or infinite
            bad = (iteration for value, iteration in zip(values, iters, strict=True) if not math.isfinite(value))
            self.nonfinite.setdefault(name, next(bad, iters[-1]))

    def _add_points(self, name: str, history: HistoryBuffer, values: list[float], iters: list[int]) -> None:
        """Give a value its own row if this metric has no value at the next iteration."""
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
        # Runs may end in another order than they began, so this storage need not be the last one.
        for index in range(len(_STORAGES) - 1, -1, -1):
            if _STORAGES[index] is self:
                del _STORAGES[index]
                break


def _reserved() -> ValueError:
    return ValueError('a metric cannot be named "iteration", which is the number of the row it stands in: rename it')
