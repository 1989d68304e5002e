"""``EventStorage``: how metrics get from steps and hooks to writers.

Putting a metric appends it to a list. Values are copied from the GPU and smoothed only when they are read.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal

from ..config.errors import NoStorageError, as_config_error, suggest
from .history_buffer import OVER_RANKS, HistoryBuffer, MediaStorage, as_scalar, copy_from_devices, table

Row = tuple[int, dict[str, float]]  # one line of metrics: the iteration, and the values by name

_MAX_PENDING = 4096  # more values of a metric are read by themselves, to limit memory in a run without writers

# The open storages. Not a context variable, so that threads of a run see its storage. The name is detectron2's.
_CURRENT_STORAGE_STACK: list["EventStorage"] = []


def get_event_storage() -> "EventStorage":
    """Return the storage of the current run. Raises a NoStorageError outside of ``with EventStorage(...)``."""
    if not _CURRENT_STORAGE_STACK:
        raise NoStorageError("get_event_storage() works inside 'with EventStorage(...)', so while a trainer trains")
    return _CURRENT_STORAGE_STACK[-1]


def has_event_storage() -> bool:
    """Return whether a run is in progress: False in an evaluation or prediction outside of training."""
    return bool(_CURRENT_STORAGE_STACK) and _CURRENT_STORAGE_STACK[-1].of_run


class EventStorage(MediaStorage):
    """Collects the scalars, images, histograms and texts of a run, by name and iteration (:attr:`iter`).

    Writers report a scalar that was put with ``smoothing_hint=True`` (a loss: noisy, put at every step) as its median
    over a window, or its mean over a ``MeanWindow``, and one with ``smoothing_hint=False`` (an accuracy) as it is.

    Args:
        start_iter: the first iteration.
    """

    of_run = True  # False: opened for an evaluation or prediction outside of training

    def __init__(self, start_iter: int = 0) -> None:
        super().__init__(start_iter)
        # Values that nobody has read yet, by name, and the smoothing hint. A value and its iteration are added in one
        # step, since another thread may read.
        self._pending: dict[str, tuple[list[tuple[Any, int]], bool]] = {}
        # Those that are tensors: a list of values, and the index.
        self._tensors: list[tuple[list[tuple[Any, int]], int]] = []
        self._buffers: dict[str, HistoryBuffer] = {}
        self._smoothing_hints: dict[str, bool] = {}
        self._hidden: set[str] = set()  # names that latest() leaves out until they are put again
        self._number = 0  # how often pending values were read; see rows()
        self._rows: dict[Any, list[Row]] = {}  # what several writers ask for, until values change
        # How metrics are combined over ranks, by name; see combine(). Until replace() they hold this rank's values.
        self.over_ranks: dict[str, str] = {}
        self.shared_until = self.iter - 1  # the last iteration whose values are combined over ranks
        self.evaluated: set[str] = set()  # names of metrics that are results of evaluations
        self.evaluations_left: dict[Any, float] = {}  # seconds of all further evaluations, by EvalHook
        self.on_bar: set[str] = set()  # names of metrics that a progress bar shows first
        self.loaded = 0  # the number of the last value that load_state_dict() loaded; see rows()

    def put_scalar(
        self,
        name: str,
        value: Any,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
        over_ranks: Literal["mean", "sum", "max", "min"] | None = None,
        bar: bool = False,
    ) -> None:
        """Add a scalar.

        Args:
            name: the metric's name. Active :meth:`name_scope` prefixes are added to it.
            value: a number, or a tensor with one element. A tensor on a GPU stays there until it is read.
            smoothing_hint: whether writers report the median over a window (True) or the value itself.
            cur_iter: the iteration it belongs to. Default: the current one.
            over_ranks: combine the ranks' values before metrics are written or saved, without a collective per step.
                A rank that put none in an iteration does not count. Rank 0, which writes, must put one.
            bar: whether a progress bar shows it before other metrics. A narrow terminal has room for few.

        Raises:
            TypeError: ``value`` is not one number.
            ValueError: the name is "iteration".
        """
        name = self._current_prefix + name
        if type(value) is not float:
            value = as_scalar(name, value)
        if bar:
            self.on_bar.add(name)
        if over_ranks is not None:
            if over_ranks not in OVER_RANKS:
                raise ValueError(f"metric {name!r}: over_ranks must be one of {[*OVER_RANKS]}, not {over_ranks!r}")
            self.over_ranks[name] = over_ranks
        points, _ = self._pending.get(name) or self._begin(name, smoothing_hint)
        points.append((value, self.iter if cur_iter is None else int(cur_iter)))
        if type(value) is not float:
            self._tensors.append((points, len(points) - 1))
        if len(points) >= _MAX_PENDING:
            self._read_pending()

    def _begin(self, name: str, smoothing_hint: bool) -> tuple[list[tuple[Any, int]], bool]:
        if name == "iteration":
            raise ValueError('a metric cannot be named "iteration", which is the number of its row: rename it')
        return self._pending.setdefault(name, ([], smoothing_hint))

    def put_scalars(self, *, smoothing_hint: bool = True, cur_iter: int | None = None, **kwargs: Any) -> None:
        """Add several scalars: ``storage.put_scalars(loss=loss, accuracy=0.5)``. See :meth:`put_scalar`."""
        for name, value in kwargs.items():
            self.put_scalar(name, value, smoothing_hint, cur_iter)

    def history(self, name: str) -> HistoryBuffer:
        """Return the recent values of a metric. Raises a KeyError if there is no such metric."""
        histories = self.histories()
        if name not in histories:
            raise KeyError(f"no metric {name!r} among those put: {', '.join(histories)}{suggest(name, histories)}")
        return histories[name]

    def histories(self, prefix: str = "") -> dict[str, HistoryBuffer]:
        """Return the recent values of all metrics, by name; with ``prefix``, of those whose name begins with it."""
        self._read_pending()
        return {name: buffer for name, buffer in self._buffers.items() if name.startswith(prefix)}

    def reset(self, prefix: str = "") -> None:
        """Forget all metrics, or those whose name begins with ``prefix``. What was written stays written."""
        for name in self.histories(prefix):
            self._forget(name)

    def _forget(self, name: str) -> None:
        del self._buffers[name], self._smoothing_hints[name]
        self._rows.clear()

    def latest(self) -> dict[str, tuple[float, int]]:
        """Return the last value of every scalar, and its iteration."""
        kept = self.histories().items()
        return {name: (one.latest(), one.latest_iter()) for name, one in kept if name not in self._hidden}

    # Hooks of detectron2's projects read these private names, and set them to forget metrics.
    def _keep_latest(self, names: Iterable[str]) -> None:
        self._hidden = {*self.histories()} - {*names}

    def _keep_history(self, names: Iterable[str]) -> None:
        for name in {*self.histories()} - {*names}:
            self._forget(name)

    _latest_scalars = property(latest, _keep_latest)
    _history = property(histories, _keep_history)

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """Like :meth:`latest`, but a smoothed scalar is the median of the last ``window_size`` iterations."""
        last, buffers, hints = self.latest(), self._buffers, self._smoothing_hints
        smoothed = {name: buffers[name].smoothed(window_size) for name in last if hints[name]}
        return {name: (smoothed.get(name, value), iteration) for name, (value, iteration) in last.items()}

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """Return how many values of a metric were put in its last ``window_size`` iterations."""
        history = self.history(name)
        return history.count_since(history.latest_iter() - window_size)

    def smoothing_hints(self) -> dict[str, bool]:
        """Return the smoothing hint of every scalar."""
        self._read_pending()
        return dict(self._smoothing_hints)

    def rows(self, window_size: int = 20, since: int = 0, first: int = 0) -> tuple[list[Row], int]:
        """Return what is new since a reader's last call, as rows.

        A smoothed metric appears once: its median, at the last iteration it was put at. Any other metric appears with
        all its values. If it was put at every iteration, like a learning rate, only its last value appears.

        Args:
            window_size: number of iterations that medians cover.
            since: the number that the reader's last call returned; 0 at first.
            first: the iteration of the first row; it also has what was put for earlier ones, whose rows are written.

        Returns:
            The rows by ascending iteration, and the number to pass next time.
        """
        self._read_pending()
        key = (type(window_size), window_size, since, first)
        if key not in self._rows:
            rows: dict[int, dict[str, float]] = {}
            for name, history in self._buffers.items():
                if not history.has_newer(since):
                    continue
                if self._smoothing_hints[name]:
                    rows.setdefault(max(history.latest_iter(), first), {})[name] = history.smoothed(window_size)
                    continue
                for (value, iteration), (_, following) in pairwise([*history.newer(since), (math.nan, -1)]):
                    if following != iteration + 1:
                        rows.setdefault(max(iteration, first), {})[name] = value
            self._rows[key] = sorted(rows.items())
        return self._rows[key], self._number

    def to_pandas(self, prefix: str = "") -> Any:
        """Return the kept values of metrics whose name begins with ``prefix`` as a DataFrame, by iteration."""
        return table(self.histories(prefix))

    def _read_pending(self) -> None:
        """Copy pending values from their devices, in one copy each, and add them to the histories."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        tensors, self._tensors = self._tensors, []
        copy_from_devices(tensors)
        self._rows.clear()
        self._number += 1
        for name, (points, smoothing_hint) in pending.items():
            if not points:  # another thread puts the first one
                continue
            if name not in self._buffers:
                self._buffers[name] = HistoryBuffer()
            values, iters = map(list, zip(*points, strict=True))
            self._buffers[name].extend(values, iters, self._number)
            self._smoothing_hints[name] = smoothing_hint
            self._hidden.discard(name)

    def replace(self, name: str, values: Mapping[int, float]) -> None:
        """Replace the latest values of a metric, given by iteration."""
        self.history(name).replace(values)
        self._rows.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the kept values, and the images, histograms and texts that writers have not taken yet."""
        # Not eta_seconds: an interrupted run writes it once more than an uninterrupted one, so a resume would differ.
        histories = {name: history for name, history in self.histories().items() if name != "eta_seconds"}
        return {
            "histories": {name: history.state_dict() for name, history in histories.items()},
            "smoothing_hints": {name: self._smoothing_hints[name] for name in histories},
            "number": self._number,
            "evaluated": sorted(self.evaluated),
            **self.media_state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Raises a ConfigError if that is not the state of a storage."""
        with as_config_error("the metrics in the checkpoint"):
            for name, state in state_dict["histories"].items():
                self._buffers[name] = HistoryBuffer()
                self._buffers[name].load_state_dict(state)
                self._smoothing_hints[name] = state_dict["smoothing_hints"][name]
            self._number = self.loaded = int(state_dict["number"])
            self._rows.clear()
            self.evaluated = set(state_dict["evaluated"])
            self.load_media(state_dict)

    def __enter__(self) -> "EventStorage":
        _CURRENT_STORAGE_STACK.append(self)
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        # The last entry that is this storage: runs may end in another order than they began.
        del _CURRENT_STORAGE_STACK[max(i for i, one in enumerate(_CURRENT_STORAGE_STACK) if one is self)]
