"""Samples and items per second."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..base import HOOK_REGISTRY, HookBase
from ..common.tensors import samples_in
from ..event_storage import has_event_storage

__all__ = ["Throughput", "Window"]


class Window:
    """The steps since the last report and their wall-clock time, including everything between them.

    Args:
        period: minimum number of steps between two reports, except at the end of the run. A resumed run reports at the
            same iterations as an uninterrupted run; its first window is shorter.
    """

    def __init__(self, period: int) -> None:
        self._period = period
        self._reported = 0  # finished iterations at the last report
        self._resumed = False

    def begin(self, iteration: int) -> None:
        """Start a run at ``iteration``."""
        if not self._resumed:
            self._reported = iteration
        self._resumed = False
        self.start(iteration)

    def start(self, iteration: int) -> None:
        """Start the window now, at the beginning of ``iteration``."""
        self.first = iteration
        self._since = time.perf_counter()

    def end(self, trainer: Any) -> tuple[int, float]:
        """Return steps and seconds of the window and start a new one; (0, 0) if no report is due."""
        done = trainer.finished_iter + 1
        steps = done - self.first
        if steps <= 0 or (done - self._reported < self._period and done < trainer.max_iter):
            return 0, 0.0
        since, self._reported = self._since, done
        self.start(done)
        return steps, max(self._since - since, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        return {"reported": self._reported}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._reported, self._resumed = state_dict["reported"], True


@HOOK_REGISTRY.register()
class Throughput(HookBase):
    """Puts the throughput over all ranks when metrics are written.

    It uses wall-clock time between two reports, including evaluations, checkpoints and waiting for data. Puts
    ``samples_per_s``, ``epoch`` (passes over the data as a fraction), ``items_per_s`` if items are counted, and
    ``time_p95`` and ``time_max`` of the step times that :class:`IterationTimer` put since the last report. After each
    evaluation it puts ``eval_time`` (seconds) and ``eval_samples_per_s``. Reads
    ``num_items`` and ``time``. Saves the iteration of its last report.

    Args:
        batch_size: samples per step over all ranks. None: from the trainer's loader (the mean over an epoch, whose
            last batch may be smaller). If the loader has no batch size, each batch is counted: the first dimension of
            its first tensor, or the length of a list of samples.
        items_of: counts items such as tokens: a function from a batch to a number, or the name of a tensor in dict
            batches, whose elements are counted. None: ``num_items`` from the storage, if it is there.
        period: minimum number of steps between two reports, except at the end of the run.
    """

    single = True

    def __init__(
        self,
        batch_size: int | None = None,
        items_of: Callable[[Any], float] | str | None = None,
        period: int = 20,
    ) -> None:
        self._batch_size = batch_size
        self._items_of = _elements_of(items_of) if isinstance(items_of, str) else items_of
        self._window = Window(period)
        self._samples = 0
        self._items = 0.0
        if self._items_of is not None:
            self._count_batches()

    def _count_batches(self) -> None:
        # Set on the instance, so that the event costs nothing if batches are not counted.
        self.after_fetch = self._count  # type: ignore[method-assign]

    def on_registered(self) -> None:
        if self._batch_size is None and self._samples_per_step() is None:
            self._count_batches()

    def before_train(self) -> None:
        self._samples, self._items = 0, 0.0
        self._window.begin(self.trainer.iter)
        self._start()

    def before_epoch(self) -> None:
        if self.trainer.iter == self.trainer.start_iter:
            self._start()  # excludes before_train of other hooks
        else:
            self._epoch_start = self.trainer.iter

    def _start(self) -> None:
        first, length = self.trainer.iter, self.trainer.iters_per_epoch
        self._epoch_start = first - first % length if length else first
        self._window.start(first)

    def _count(self, batch: Any) -> None:
        self._samples += samples_in(batch) or 0
        if self._items_of is not None:
            self._items += self._items_of(batch)

    def before_write(self) -> None:
        trainer = self.trainer
        steps, seconds = self._window.end(trainer)
        if not steps:
            return
        values = {"epoch": self._epoch()}
        samples = self._batch_size or self._samples_per_step()
        data_size = trainer.comm.get_data_size()
        if samples is not None:
            values["samples_per_s"] = samples * steps / seconds
        elif self._samples:
            values["samples_per_s"] = self._samples * data_size / seconds
        histories = trainer.storage.histories()
        since = self._window.first - steps - 1
        if self._items_of is not None:
            values["items_per_s"] = self._items * data_size / seconds
        elif "num_items" in histories and (count := histories["num_items"].count_since(since)):
            values["items_per_s"] = histories["num_items"].avg(count) * steps / seconds
        if "time" in histories and (count := histories["time"].count_since(since)):
            times = sorted(value for value, _ in histories["time"].tail(count))
            values["time_p95"] = times[math.ceil(0.95 * count) - 1]
            values["time_max"] = times[-1]
        self._samples, self._items = 0, 0.0
        trainer.storage.put_scalars(smoothing_hint=False, cur_iter=trainer.finished_iter, **values)

    def before_eval(self) -> None:
        self._eval_samples, self._eval_since = 0, time.perf_counter()

    def after_eval_step(self, batch: Any, outputs: Any) -> None:
        self._eval_samples += samples_in(batch) or 0

    def after_eval(self, results: Any) -> None:
        if not has_event_storage():  # an evaluation without training
            return
        seconds = max(time.perf_counter() - self._eval_since, 1e-9)
        values: dict[str, Any] = {"eval_time": seconds}
        if self._eval_samples:
            values["eval_samples_per_s"] = self._eval_samples * self.trainer.comm.get_data_size() / seconds
        self.trainer.storage.put_scalars(smoothing_hint=False, **values)

    def state_dict(self) -> dict[str, Any]:
        return self._window.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._window.load_state_dict(state_dict)

    def _epoch(self) -> float:
        trainer = self.trainer
        if not trainer.iters_per_epoch:
            return float(trainer.epoch)
        return trainer.epoch + min((trainer.finished_iter + 1 - self._epoch_start) / trainer.iters_per_epoch, 1.0)

    def _samples_per_step(self) -> float | None:
        """Return the mean number of samples per step over all ranks; None if the loader has no batch size."""
        loader = getattr(self.trainer, "data_loader", None)
        batches: Any = getattr(loader, "batch_sampler", None)
        size = getattr(batches, "batch_size", None) or getattr(loader, "batch_size", None)
        if not isinstance(size, int):
            return None
        mean: float = size
        with suppress(AttributeError, TypeError, ZeroDivisionError):  # an infinite sampler
            mean = min(size, len(batches.sampler) / len(batches))
        # The batch size of hookline's samplers is over all ranks, that of torch's is per rank.
        return mean if hasattr(batches, "world_size") else mean * self.trainer.comm.get_data_size()


def _elements_of(name: str) -> Callable[[Any], float]:
    return lambda batch: batch[name].numel()
