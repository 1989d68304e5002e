"""Memory: statistics, a record of allocations, and garbage collection between steps."""

import gc
import logging
import os
from contextlib import suppress

import torch

from ...config import Duration
from ..base import HOOK_REGISTRY, Every, HookBase, Period
from ..common import run_folder

logger = logging.getLogger(__name__)

_FULL = 10
"""Every tenth collection covers all generations. Frozen objects are left out, so it is fast."""


@HOOK_REGISTRY.register()
class MemoryMonitor(HookBase):
    """Puts memory use in MiB when metrics are written. Does not wait for the device.

    Puts ``rss_mem`` (the process's resident memory, on Linux) and, if CUDA is used, ``max_mem`` (peak memory of
    tensors so far) and ``reserved_mem`` (memory that torch's allocator holds). Saves nothing.
    """

    single = True

    def before_train(self) -> None:
        self._last = self.trainer.start_iter - 1

    def before_write(self) -> None:
        trainer = self.trainer
        if trainer.finished_iter <= self._last:
            return
        self._last = trainer.finished_iter
        values: dict[str, float] = {}
        with suppress(OSError), open("/proc/self/statm") as file:
            values["rss_mem"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            values["max_mem"] = torch.cuda.max_memory_allocated() / 2**20
            values["reserved_mem"] = torch.cuda.memory_reserved() / 2**20
        trainer.storage.put_scalars(smoothing_hint=False, cur_iter=self._last, **values)


@HOOK_REGISTRY.register()
class TorchMemoryStats(HookBase):
    """Logs CUDA memory statistics: one line each time, and torch's full table the first time.

    Acts in ``after_step``. Puts no metrics; :class:`MemoryMonitor` does. Peaks are since the start of the process.
    Without CUDA it only logs that. Saves nothing.

    Args:
        period: a duration.
        max_runs: maximum number of reports.
    """

    _period = Period(at_end=True)

    def __init__(self, period: "Duration | int | str" = 20, max_runs: int = 10) -> None:
        self._every = Every(period, at_end=True)
        self._max_runs = max_runs
        self._runs = 0

    def before_train(self) -> None:
        self._runs = 0
        self._every.start()
        if not torch.cuda.is_available():
            logger.info("TorchMemoryStats: there is no CUDA device, so there is nothing to report")
            self._runs = self._max_runs

    def after_step(self) -> None:
        if self._runs >= self._max_runs or not self._every(self.trainer):
            return
        self._runs += 1
        cuda = torch.cuda
        amounts = cuda.memory_allocated, cuda.max_memory_allocated, cuda.memory_reserved, cuda.max_memory_reserved
        logger.info(
            "GPU memory at iteration %d, in MiB: allocated %.0f (peak %.0f), reserved %.0f (peak %.0f)",
            self.trainer.iter,
            *(amount() / 2**20 for amount in amounts),
        )
        if self._runs == 1:
            logger.info("\n%s", cuda.memory_summary())


@HOOK_REGISTRY.register()
class MemorySnapshot(HookBase):
    """Records all allocations of GPU memory in some steps, and writes them to a file for https://pytorch.org/memory_viz.

    Writes ``memory_iter<start>.pickle``, on other ranks ``memory_iter<start>_rank<rank>.pickle``, after the last of the
    steps, or when an error such as out of memory ends training. Without CUDA it only logs that. Saves nothing.

    Args:
        output_dir: folder of the file. Default: the run's folder, or the current one if the trainer has no config.
        start: the first iteration that is recorded.
        steps: number of iterations.
    """

    def __init__(self, output_dir: str | None = None, start: int = 10, steps: int = 3) -> None:
        self._output_dir = output_dir
        self._start = start
        self._steps = steps
        self._recording = False

    def before_train(self) -> None:
        if not torch.cuda.is_available():
            logger.info("MemorySnapshot: there is no CUDA device, so there is nothing to record")

    def before_step(self) -> None:
        if self.trainer.iter == self._start and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=100_000)
            self._recording = True

    def after_step(self) -> None:
        if self.trainer.iter + 1 >= self._start + self._steps:
            self._write()

    def after_train(self) -> None:
        self._write()

    def _write(self) -> None:
        if not self._recording:
            return
        self._recording = False
        rank = self.trainer.comm.get_rank()
        name = f"memory_iter{self._start}{f'_rank{rank}' if rank else ''}.pickle"
        path = os.path.join(self._output_dir or run_folder(self.trainer) or ".", name)
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)
        logger.info("GPU memory of iterations %d to %d: %s", self._start, self.trainer.iter, path)


@HOOK_REGISTRY.register()
class GarbageCollection(HookBase):
    """Collects Python's garbage between steps, after the same steps on all ranks.

    Automatic collections make steps longer, and all ranks wait for the slowest. This hook collects once at the start,
    freezes the remaining objects (collections skip them) and turns automatic collection off. In ``after_step`` it
    collects young objects every ``period``, and all objects every tenth time. ``after_train`` turns it
    on again and unfreezes all objects, if it was on before. Puts and saves nothing.

    Args:
        period: a duration.
    """

    single = True

    def __init__(self, period: "Duration | int | str" = 100) -> None:
        self._every = Every(period)
        self._collections = 0
        self._was_enabled = False

    def before_train(self) -> None:
        self._every.start()
        self._collections = 0
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self) -> None:
        if self._every(self.trainer):
            self._collections += 1
            gc.collect(1 if self._collections % _FULL else 2)

    def after_train(self) -> None:
        if self._was_enabled:
            gc.unfreeze()
            gc.enable()
