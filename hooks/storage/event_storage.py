"""``EventStorage``: how metrics get from steps and hooks to writers.

Putting a metric appends it to a list. Values are copied from the GPU, smoothed and sorted only when they are read.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Any, Literal

import torch

from ...config.errors import loading, suggest
from .history_buffer import HistoryBuffer
from .media import MediaStorage
from .metric import Metric
from .over_ranks import OverRanks
from .pending import as_scalar, by_name, fetch_tensors
from .tables import Tables

__all__ = ["EventStorage", "Row", "get_event_storage", "has_event_storage"]

Row = tuple[int, dict[str, float]]
"""One line of metrics: the iteration, and the values by name."""

# The open storages. Not a context variable, so that threads of a run see its storage. The name is detectron2's.
_CURRENT_STORAGE_STACK: list["EventStorage"] = []

# Limits of memory in a run without writers: values not read yet, values in rows of their own.
_MAX_PENDING = 4096
_MAX_POINTS = 4096
_MAX_SAVED_POINTS = 256

_RESERVED = 'a metric cannot be named "iteration", which is the number of the row it stands in: rename it'


def get_event_storage() -> "EventStorage":
    """Return the storage of the current run.

    Raises:
        RuntimeError: nothing is training: there is no ``with EventStorage(...)`` around this call.
    """
    if not _CURRENT_STORAGE_STACK:
        raise RuntimeError("get_event_storage() works inside 'with EventStorage(...)', so while a trainer trains")
    return _CURRENT_STORAGE_STACK[-1]


def has_event_storage() -> bool:
    """Return whether a run is in progress: False in an evaluation or prediction outside of training."""
    return bool(_CURRENT_STORAGE_STACK) and _CURRENT_STORAGE_STACK[-1].of_run


class EventStorage(MediaStorage, OverRanks, Tables):
    """Collects the scalars, images, histograms and texts of a run, by name and iteration (:attr:`iter`).

    Writers report a scalar that was put with ``smoothing_hint=True`` (a loss: noisy, put at every step) as its median
    over a window, or as its mean over a :class:`~hookline.hooks.storage.metric.MeanWindow`, and one with
    ``smoothing_hint=False`` (an accuracy, a learning rate) as it is. Names may contain slashes. Writers group metrics
    by what comes before the first slash.

    Args:
        start_iter: the first iteration.
    """

    of_run = True  # False: opened for an evaluation or prediction outside of training

    def __init__(self, start_iter: int = 0) -> None:
        MediaStorage.__init__(self, start_iter)
        OverRanks.__init__(self, int(start_iter))
        # Values that nobody has read yet: (iteration, values, smoothing hint), in the order they were put.
        self._pending: list[tuple[int, dict[str, Any], bool]] = []
        self._on_device = False  # whether some of them are tensors on a device
        self._metrics: dict[str, Metric] = {}
        # The last results of rows() and latest_with_smoothing_hint(), and for which arguments.
        self._rows: tuple[Any, list[Row]] = (None, [])
        self._smoothed: tuple[Any, dict[str, tuple[float, int]]] = (None, {})
        # Values with a row of their own, by ascending number: (number, iteration, name, value).
        self._points: list[tuple[int, int, str, float]] = []
        self.evaluated: set[str] = set()
        """Names of metrics that are results of evaluations."""
        self.loaded = 0
        """The number of the last value that :meth:`load_state_dict` loaded; see :meth:`rows`."""
        self.longest_window = 0
        """The longest window of a writer: a checkpoint has as many values of each metric."""

    # ------------------------------------------------------------------ put

    def put_scalar(
        self,
        name: str,
        value: Any,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
        over_ranks: Literal["mean", "sum", "max", "min"] | None = None,
    ) -> None:
        """Add a scalar.

        Args:
            name: the metric's name. Active :meth:`name_scope` prefixes are added to it.
            value: a number, or a tensor with one element. A tensor on a GPU stays there until it is read.
            smoothing_hint: whether writers report the median over a window (True) or the value itself.
            cur_iter: the iteration it belongs to. Default: the current one.
            over_ranks: combine the ranks' values before metrics are written or saved, without a collective per step.
                A rank that put none in an iteration does not count. Rank 0, which writes, must put one.

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
            raise ValueError(_RESERVED)
        if over_ranks is not None:
            self._combine_over_ranks(name, over_ranks)
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
            raise ValueError(_RESERVED)
        self._pending.append((self._iter if cur_iter is None else int(cur_iter), kwargs, smoothing_hint))
        if len(self._pending) >= _MAX_PENDING:
            self._resolve()

    # ------------------------------------------------------------------ read

    def history(self, name: str) -> HistoryBuffer:
        """Return the recent values of a metric.

        Raises:
            KeyError: there is no such metric.
        """
        histories = self.histories()
        if name not in histories:
            there = ", ".join(histories) or "none yet"
            raise KeyError(f"no metric {name!r} among those put ({there}){suggest(name, histories)}")
        return histories[name]

    def histories(self, prefix: str = "") -> dict[str, HistoryBuffer]:
        """Return the recent values of all metrics, by name; with ``prefix``, of those whose name begins with it."""
        self._resolve()
        return {name: metric.history for name, metric in self._metrics.items() if name.startswith(prefix)}

    def reset(self, prefix: str = "") -> None:
        """Forget all metrics, or those whose name begins with ``prefix``. What was written stays written."""
        self._resolve()
        for name in [name for name in self._metrics if name.startswith(prefix)]:
            del self._metrics[name]
            self.nonfinite.pop(name, None)
        self._points = [point for point in self._points if point[2] in self._metrics]
        self._rows, self._smoothed = (None, []), (None, {})

    def peek(self, name: str) -> float | None:
        """Return the last value that was read of a metric, or None. Never waits; safe to call from any thread."""
        metric = self._metrics.get(name)
        return metric.history.latest() if metric else None

    def latest(self) -> dict[str, tuple[float, int]]:
        """Return the last value of every scalar, and its iteration."""
        return {name: (history.latest(), history.latest_iter()) for name, history in self.histories().items()}

    # Hooks of detectron2's projects read these private names.
    _latest_scalars = property(latest)
    _history = property(histories)

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """Like :meth:`latest`, but a smoothed scalar is the median of the last ``window_size`` iterations."""
        self._resolve()
        key = (type(window_size), window_size, self._seq)
        if key != self._smoothed[0]:  # the console asks twice in a write
            values = {name: (m.reported(window_size), m.history.latest_iter()) for name, m in self._metrics.items()}
            self._smoothed = (key, values)
        return dict(self._smoothed[1])

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """Return how many values of a metric were put in its last ``window_size`` iterations."""
        history = self.history(name)
        return history.count_since(history.latest_iter() - window_size)

    def smoothing_hints(self) -> dict[str, bool]:
        """Return the smoothing hint of every scalar."""
        self._resolve()
        return {name: metric.smoothing_hint for name, metric in self._metrics.items()}

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
        key = (type(window_size), window_size, since, self._seq)
        if key == self._rows[0]:  # several writers read the same rows
            return self._rows[1], self._seq
        rows: dict[int, dict[str, float]] = {}
        for _, iteration, name, value in self._points[bisect_left(self._points, (since + 1,)) :]:
            rows.setdefault(iteration, {})[name] = value
        for name, metric in self._metrics.items():
            if metric.seq > since:
                rows.setdefault(metric.history.latest_iter(), {})[name] = metric.reported(window_size)
        self._rows = (key, sorted(rows.items()))
        return self._rows[1], self._seq

    # ------------------------------------------------------------------ state

    def state_dict(self, most: int = 2000) -> dict[str, Any]:
        """Return recent values of the metrics, at most ``most`` of each or as many as a writer's window has, and values
        that writers have not taken yet."""
        self._resolve()
        most = max(most, self.longest_window)
        # Not eta_seconds: an interrupted run writes it once more than an uninterrupted one, so a resume would differ.
        metrics = {name: metric for name, metric in self._metrics.items() if name != "eta_seconds"}
        return {
            "histories": {name: metric.history.state_dict(most) for name, metric in metrics.items()},
            "smoothing_hints": {name: metric.smoothing_hint for name, metric in metrics.items()},
            "seq": self._seq,
            "last_seq": {name: metric.seq for name, metric in metrics.items()},
            # Writers have taken all points before these.
            "points": [point for point in self._points[-_MAX_SAVED_POINTS:] if point[2] != "eta_seconds"],
            "evaluated": sorted(self.evaluated),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ConfigError: ``state_dict`` is not the state of a storage.
        """
        with loading("the metrics in the checkpoint"):
            for name, state in state_dict["histories"].items():
                metric = Metric(state_dict["smoothing_hints"][name], state_dict["last_seq"][name])
                metric.history.load_state_dict(state)
                self._metrics[name] = metric
            self._seq = self.loaded = int(state_dict["seq"])
            self._rows, self._smoothed = (None, []), (None, {})
            self._points = sorted(tuple(point) for point in state_dict["points"])
            self.evaluated = set(state_dict.get("evaluated", ()))

    # ------------------------------------------------------------------ internals

    def _resolve(self) -> None:
        """Copy pending values from their devices, in one copy each, and add them to the histories."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        if self._on_device:
            self._on_device = False
            fetch_tensors(pending)
        for name, (values, iters, smoothing_hint) in by_name(pending).items():
            if name not in self._metrics:
                self._metrics[name] = Metric()
            metric = self._metrics[name]
            metric.smoothing_hint = smoothing_hint
            for is_new, iteration, value in metric.points(values, iters):
                insort(self._points, (self._next_seq() if is_new else metric.seq, iteration, name, value))
            metric.history.extend(values, iters)
            metric.seq = self._next_seq()
            self._note_nonfinite(name, values, iters)
        if len(self._points) > 2 * _MAX_POINTS:
            del self._points[:-_MAX_POINTS]

    def __enter__(self) -> "EventStorage":
        _CURRENT_STORAGE_STACK.append(self)
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        # The last entry that is this storage: runs may end in another order than they began.
        del _CURRENT_STORAGE_STACK[max(i for i, one in enumerate(_CURRENT_STORAGE_STACK) if one is self)]
