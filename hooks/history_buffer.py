"""What an ``EventStorage`` keeps: the recent values of each metric, and images, histograms and texts."""

import logging
import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


# Not those of the module statistics: its import takes longer than that of all hooks.
def mean(values: Sequence[float]) -> float:
    """Return the mean of some numbers."""
    return math.fsum(values) / len(values)


def median(values: Sequence[float]) -> float:
    """Return the median of some numbers: with an even count, the mean of the two in the middle."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


OVER_RANKS: dict[str, Callable[[Sequence[float]], float]] = {"mean": mean, "sum": math.fsum, "max": max, "min": min}


class MeanWindow(int):
    """A window, in iterations, over which smoothed scalars are reported as their mean; over an int, as the median."""


class HistoryBuffer:
    """The recent values of one scalar and their iterations, with fvcore's interface.

    Stored in flat arrays, 24 bytes per value, so memory stays bounded in a long run.

    Args:
        max_length: number of values kept. Older values count only in :meth:`global_avg`.
    """

    __slots__ = ("_count", "_iters", "_max_length", "_numbers", "_smoothed", "_total", "_values")

    def __init__(self, max_length: int = 10_000) -> None:
        self._max_length = max_length
        self._values = array("d")
        self._iters = array("q")
        self._numbers = array("q")
        self._count = 0
        self._total = 0.0
        self._smoothed: tuple[Any, float] | None = None  # the window that was last asked for, and its value

    def __len__(self) -> int:
        return min(len(self._values), self._max_length)

    def update(self, value: float | torch.Tensor, iteration: float | None = None) -> None:
        """Append ``value``, a number or a tensor of one, of ``iteration`` (default: the number of values so far)."""
        self.extend([float(value)], [self._count if iteration is None else int(iteration)])

    def extend(self, values: list[float], iters: list[int], number: int = 0) -> None:
        """Append several values. ``number``: see :meth:`newer`; it never decreases."""
        self._smoothed = None
        self._values.fromlist(values)
        self._iters.fromlist(iters)
        self._numbers.extend(array("q", [number]) * len(values))
        self._count += len(values)
        # Not sum(), which rounds differently: the mean must not depend on how many values are appended at once.
        self._total = reduce(add, values, self._total)
        # Cutting a whole window at a time keeps the average cost constant.
        if len(self._values) >= 2 * self._max_length:
            for one in (self._values, self._iters, self._numbers):
                del one[: -self._max_length]

    def replace(self, values: Mapping[int, float]) -> None:
        """Replace the latest values, given by iteration."""
        self._smoothed = None
        first = min(values, default=0)
        for index in range(len(self._iters) - 1, -1, -1):
            iteration = self._iters[index]
            if iteration < first:
                break
            if iteration in values:
                self._total += values[iteration] - self._values[index]
                self._values[index] = values[iteration]

    def latest(self) -> float:
        """Return the last value."""
        return self._values[-1]

    def latest_iter(self) -> int:
        """Return the iteration of the last value."""
        return self._iters[-1]

    def median(self, window_size: int) -> float:
        """Return the median of the last ``window_size`` values; NaN if there are none, or any of them is NaN."""
        window = self._values[-min(window_size, self._max_length) :]
        return median(window) if window and not math.isnan(sum(window)) else math.nan

    def avg(self, window_size: int) -> float:
        """Return the mean of the last ``window_size`` values; NaN if there are none."""
        window = self._values[-min(window_size, self._max_length) :]
        return mean(window) if window else math.nan

    def global_avg(self) -> float:
        """Return the mean of all values ever put, including those no longer kept."""
        return self._total / max(self._count, 1)

    def count_since(self, iteration: int) -> int:
        """Return the number of values after ``iteration``."""
        return len(self._iters) - bisect_right(self._iters, iteration)

    def tail(self, count: int) -> list[tuple[float, int]]:
        """Return the last ``count`` values, oldest first, each with its iteration."""
        start = -min(count, self._max_length)
        return list(zip(self._values[start:], self._iters[start:], strict=True)) if count else []

    def has_newer(self, number: int) -> bool:
        """Return whether the last value has a greater number (of :meth:`extend`)."""
        return self._numbers[-1] > number

    def newer(self, number: int) -> list[tuple[float, int]]:
        """Return the values whose number (of :meth:`extend`) is greater, as :meth:`tail` does."""
        return self.tail(len(self._numbers) - bisect_right(self._numbers, number))

    def values(self) -> list[tuple[float, int]]:
        """Return the kept values, oldest first, each with its iteration."""
        return self.tail(self._max_length)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the iterations and the kept values as arrays, oldest first: ``plt.plot(*history.arrays())``."""
        start = -self._max_length
        return np.array(self._iters[start:]), np.array(self._values[start:])

    # Hooks of detectron2's projects read fvcore's private list.
    _data = property(values)

    def smoothed(self, window_size: int) -> float:
        """Return the median over the last ``window_size`` iterations; the mean if it is a :class:`MeanWindow`."""
        window = type(window_size), window_size
        if self._smoothed is None or self._smoothed[0] != window:  # several writers ask for it
            count = max(1, self.count_since(self.latest_iter() - window_size))
            value = self.avg(count) if isinstance(window_size, MeanWindow) else self.median(count)
            self._smoothed = window, value
        return self._smoothed[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the kept values and what :meth:`global_avg` needs, as plain data."""
        start = -self._max_length
        # As tensors, since a checkpoint saves a tensor faster than a list.
        arrays: dict[str, Sequence[float]] = {"values": self._values, "iters": self._iters, "numbers": self._numbers}
        tensors = {name: torch.from_numpy(np.array(values[start:])) for name, values in arrays.items()}
        return {**tensors, "count": self._count, "total": self._total}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._values = array("d", state_dict["values"].tolist())
        self._iters = array("q", state_dict["iters"].tolist())
        self._numbers = array("q", state_dict["numbers"].tolist())
        self._count, self._total = int(state_dict["count"]), float(state_dict["total"])
        self._smoothed = None


class MediaStorage:
    """Knows the iteration and the name scope, and keeps images, histograms and texts until writers have taken them.

    Args:
        start_iter: the first iteration.
    """

    def __init__(self, start_iter: int) -> None:
        self.iter = int(start_iter)
        """The current iteration. During a step it equals ``trainer.iter``."""
        self._current_prefix = ""
        # What no writer has taken yet, in detectron2's form and under its names.
        self._vis_data: deque[tuple[str, torch.Tensor, int]] = deque(maxlen=64)
        self._histograms: deque[dict[str, Any]] = deque(maxlen=4096)  # one of each parameter
        self._texts: deque[tuple[str, str, int]] = deque(maxlen=4096)
        self.saves_media = False
        """Whether a writer takes images, histograms and texts. Those not taken yet are then part of the state."""

    @property
    def iteration(self) -> int:
        """Same as :attr:`iter`; its name in early detectron2."""
        return self.iter

    @property
    def _iter(self) -> int:  # as code of detectron2's projects reads and sets it
        return self.iter

    @_iter.setter
    def _iter(self, value: int) -> None:
        self.iter = int(value)

    def step(self) -> None:
        """Increase :attr:`iter` by one, in a hand-written loop. A trainer sets :attr:`iter`."""
        self.iter += 1

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Add the prefix ``name/`` to every name put inside the block. Scopes nest."""
        outer = self._current_prefix
        self._current_prefix = outer + name.rstrip("/") + "/"
        try:
            yield
        finally:
            self._current_prefix = outer

    def put_image(self, img_name: str, img_tensor: torch.Tensor | np.ndarray) -> None:
        """Add an image: (3, H, W) RGB or (1, H, W); uint8 in [0, 255] or float in [0, 1]."""
        image = torch.as_tensor(img_tensor).detach().clone()
        self._vis_data.append((self._current_prefix + img_name, image, self.iter))

    def put_histogram(self, hist_name: str, hist_tensor: torch.Tensor, bins: int = 1000) -> None:
        """Add a histogram of a tensor's values, with ``bins`` equal bins between the smallest and the largest.

        Values that are NaN or infinite are left out, with a warning. A tensor without other values has no histogram.
        """
        values = hist_tensor.detach().flatten().float()
        finite = values[values.isfinite()]
        if left_out := values.numel() - finite.numel():
            logger.warning("%s: %d of %d values are NaN or infinite", hist_name, left_out, values.numel())
        if not finite.numel():
            return
        low, high = finite.min().item(), finite.max().item()
        hist = {  # the arguments of SummaryWriter.add_histogram_raw
            "tag": self._current_prefix + hist_name,
            "min": low,
            "max": high,
            "num": finite.numel(),
            "sum": finite.sum().item(),
            "sum_squares": (finite**2).sum().item(),
            "bucket_limits": torch.linspace(low, high, steps=bins + 1, dtype=torch.float32)[1:].tolist(),
            "bucket_counts": torch.histc(finite, bins).tolist(),
            "global_step": self.iter,
        }
        self._histograms.append(hist)

    def put_text(self, name: str, text: str) -> None:
        """Add a text, for example a sample of a language model."""
        self._texts.append((self._current_prefix + name, text, self.iter))

    def clear_images(self) -> None:
        """Discard the images: they are written."""
        self._vis_data.clear()

    def clear_histograms(self) -> None:
        """Discard the histograms: they are written."""
        self._histograms.clear()

    def clear_media(self) -> None:
        """Discard images, histograms and texts: they are written."""
        for entries in self._media().values():
            entries.clear()

    def media_state(self) -> dict[str, Any]:
        """Return what writers have not taken yet; empty if none of them takes images, histograms and texts."""
        return {name: list(entries) for name, entries in self._media().items()} if self.saves_media else {}

    def load_media(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`media_state` returned."""
        self.saves_media |= bool(state_dict.keys() & self._media().keys())
        for name, entries in self._media().items():
            entries.extend(state_dict.get(name, ()))

    def _media(self) -> dict[str, deque[Any]]:
        return {"images": self._vis_data, "histograms": self._histograms, "texts": self._texts}


def table(histories: Mapping[str, HistoryBuffer]) -> Any:
    """Return the kept values as a pandas DataFrame; see :meth:`EventStorage.to_pandas`."""
    import pandas

    columns = {name: {it: value for value, it in history.values()} for name, history in histories.items()}
    return pandas.DataFrame(columns).sort_index().rename_axis("iteration")


def combine(how: str, values: Sequence[float], ranks: int) -> float:
    """Return the value of a metric over all ranks.

    Args:
        how: "mean", "sum", "max" or "min"; or "loss": a mean to which a rank without a value adds 0, like its gradient.
        values: those of the ranks that have one, at least one.
        ranks: number of ranks.
    """
    if any(map(math.isnan, values)):
        return math.nan
    return sum(values) / ranks if how == "loss" else OVER_RANKS[how](values)


def as_scalar(name: str, value: Any) -> float | torch.Tensor:
    """Return a float, or for a tensor on a device a copy of it that later in-place changes do not affect.

    Raises:
        TypeError: ``value`` is not one number.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(f"metric {name!r} must be one number, not a tensor of shape {tuple(value.shape)}")
        return float(value.item()) if value.device.type == "cpu" else value.detach().clone().reshape(())
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} must be a number or a tensor with one element, not {value!r}") from error


def copy_from_devices(places: Iterable[tuple[list[tuple[Any, int]], int]]) -> None:
    """Replace tensors in lists by their numbers, with one stack and one copy for each device and dtype.

    Args:
        places: the list of each tensor, with iterations, and its index there.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[list[tuple[Any, int]], int]]] = {}
    for points, index in places:
        groups.setdefault((points[index][0].device, points[index][0].dtype), []).append((points, index))
    for group in groups.values():
        found = torch.stack([points[index][0] for points, index in group]).tolist()
        for (points, index), number in zip(group, found, strict=True):
            points[index] = float(number), points[index][1]
