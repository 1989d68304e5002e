"""Time per step, cost of hooks, and throughput."""

import datetime
import logging
import time
from collections.abc import Callable
from typing import Any

from ..base import HOOK_REGISTRY, HookBase
from ..common import samples_in
from ..event_storage import has_event_storage

logger = logging.getLogger(__name__)

_LARGE = 0.01  # hooks with a larger share of the run's time are reported on the console
_FIRST, _WAITS, _NOTABLE = 100, 0.25, 1e-3  # steps; the share of a step, and the seconds, of a large data time


@HOOK_REGISTRY.register()
class IterationTimer(HookBase):
    """Puts the seconds of each step as ``time``. At the end, logs the speed of the run and the cost of each hook.

    Warns once after 100 steps if they have waited for data a quarter of their time or more.

    A step lasts from ``before_step`` to ``after_step``. Register this hook first, so that the time of other hooks in
    ``after_step`` does not count; it is reported separately.

    Args:
        warmup_iter: number of steps at the start that do not count in the report. The last of them is put.
    """

    single = True
    _judged = False  # whether the data time was looked at

    def __init__(self, warmup_iter: int = 3) -> None:
        self._warmup_iter = warmup_iter

    def before_train(self) -> None:
        self._first = self.trainer.start_iter
        self._start = time.perf_counter()
        self._steps_time = 0.0
        self._steps = 0

    def after_step(self) -> None:
        now = time.perf_counter()
        trainer = self.trainer
        seconds = now - trainer.step_start
        done = trainer.iter - self._first + 1
        if done > self._warmup_iter:
            self._steps += 1
            self._steps_time += seconds
        # A resumed run puts all, so that its metrics have the same rows as an uninterrupted run's.
        if done >= self._warmup_iter or self._first:
            trainer.storage.put_scalar("time", seconds)

    def before_write(self) -> None:
        if self._judged or self.trainer.finished_iter + 1 - self._first < _FIRST:
            return
        self._judged = True
        if self._steps and (data_time := self.trainer.storage.histories().get("data_time")):
            seconds, step = data_time.avg(self._steps), self._steps_time / self._steps
            if seconds >= max(_WAITS * step, _NOTABLE):
                text = "data time is %.0f %% of a step: raise DATALOADER.NUM_WORKERS, or num_workers of your own loader"
                logger.warning(text, 100 * seconds / step)

    def after_run(self) -> None:
        if not self._steps:
            return
        now, steps = time.perf_counter(), self._steps_time
        each = steps / self._steps
        logger.info("Overall training speed: %d iterations in %s (%.4g s / it)", self._steps, _duration(steps), each)
        total, costs = now - self._start, self.trainer.hooks.costs()
        on_hooks = sum(seconds for seconds, _ in costs.values())
        logger.info("Total training time: %s (%s on hooks)", _duration(total), _duration(on_hooks))
        lines = [f"  {'hook':<28} {'total':>10} {'per call':>10} {'share':>7}"]
        for name, (seconds, calls) in costs.items():
            share = seconds / total
            if share > _LARGE:
                each_call = format_seconds(seconds / calls)
                lines.append(f"  {name:<28} {format_seconds(seconds):>10} {each_call:>10} {share:>7.1%}")
        if len(lines) > 1:
            logger.info("Time spent in hooks (above %.0f%%):\n%s", 100 * _LARGE, "\n".join(lines))


@HOOK_REGISTRY.register()
class Throughput(HookBase):
    """Puts the throughput over all ranks when metrics are written.

    It uses wall-clock time between two writes, including evaluations, checkpoints and waiting for data, and this rank's
    samples, if their number is known. Puts ``samples_per_s``, ``epoch`` (passes over the data as a fraction), and
    ``items_per_s`` if items are counted. After each evaluation it puts ``eval_time`` (seconds) and
    ``eval_samples_per_s``. Reads ``num_items``. Saves nothing.

    Args:
        items_of: counts items such as tokens: a function from a batch to a number, or the name of a tensor in dict
            batches, whose elements are counted. None: ``num_items`` from the storage, if it is there.
    """

    single = True

    def __init__(self, items_of: "Callable[[Any], float] | str | None" = None) -> None:
        name = items_of
        self._items_of = (lambda batch: batch[name].numel()) if isinstance(items_of, str) else items_of

    def before_train(self) -> None:
        first, length = self.trainer.iter, self.trainer.iters_per_epoch
        self._epoch_start = first - first % length if length else first
        self._begin_window()

    def before_epoch(self) -> None:
        if self.trainer.iter == self.trainer.start_iter:
            self._begin_window()  # excludes before_train of other hooks
        else:
            self._epoch_start = self.trainer.iter

    def _begin_window(self) -> None:
        self._first, self._since = self.trainer.finished_iter + 1, time.perf_counter()
        self._samples, self._items = 0, 0.0

    def after_fetch(self, batch: Any) -> None:
        self._samples += samples_in(batch) or 0
        if self._items_of is not None:
            self._items += self._items_of(batch)

    def before_write(self) -> None:
        trainer = self.trainer
        steps, seconds = trainer.finished_iter + 1 - self._first, max(time.perf_counter() - self._since, 1e-9)
        if steps <= 0:
            return
        epoch = float(trainer.epoch)
        if trainer.iters_per_epoch:
            epoch += min((trainer.finished_iter + 1 - self._epoch_start) / trainer.iters_per_epoch, 1.0)
        values = {"epoch": epoch}
        data_size = trainer.comm.get_data_size()
        if self._samples:
            values["samples_per_s"] = self._samples * data_size / seconds
        counts = trainer.storage.histories().get("num_items")
        if self._items_of is not None:
            values["items_per_s"] = self._items * data_size / seconds
        elif counts and (count := counts.count_since(self._first - 1)):
            values["items_per_s"] = counts.avg(count) * steps / seconds
        trainer.storage.put_scalars(smoothing_hint=False, cur_iter=trainer.finished_iter, **values)
        self._begin_window()

    def before_eval(self) -> None:
        self._eval_samples, self._eval_since = 0, time.perf_counter()

    def after_eval_step(self, batch: object, outputs: object) -> None:
        self._eval_samples += samples_in(batch) or 0

    def after_eval(self, results: object) -> None:
        if not has_event_storage():  # an evaluation without training
            return
        values: dict[str, Any] = {"eval_time": max(time.perf_counter() - self._eval_since, 1e-9)}
        if self._eval_samples:
            samples = self._eval_samples * self.trainer.comm.get_data_size()
            values["eval_samples_per_s"] = samples / values["eval_time"]
        self.trainer.storage.put_scalars(smoothing_hint=False, **values)


def format_seconds(seconds: float) -> str:
    """Format a time in seconds, milliseconds or microseconds."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))
