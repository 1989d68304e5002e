"""Where time and memory go: profilers, memory statistics, and when garbage is collected."""

import gc
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from ...config import ConfigError, Duration
from ...config.files.run_folder import claim
from ..base import HOOK_REGISTRY, HookBase
from ..every import Every

__all__ = ["AutogradProfiler", "GarbageCollection", "MemoryMonitor", "TorchMemoryStats", "TorchProfiler"]

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------- profilers


class _StepProfiler(HookBase):
    """Profiles some steps, each by itself; a subclass says with what."""

    def __init__(
        self,
        enable_predicate: Callable[[Any], bool] | None,
        output_dir: str,
        start: int | None,
        steps: int | None,
    ) -> None:
        if enable_predicate is not None and (start is not None or steps is not None):
            raise ConfigError(f"{type(self).__name__} takes enable_predicate, or start and steps, not both")
        self._enable_predicate = enable_predicate
        self._output_dir = output_dir
        self._start = 10 if start is None else start
        self._steps = 3 if steps is None else steps
        self._first = self._end = 0
        self._profiler: Any = None

    def before_train(self) -> None:
        self._first = self.trainer.start_iter + self._start
        self._end = self._first + self._steps

    def before_step(self) -> None:
        trainer, predicate = self.trainer, self._enable_predicate
        if self._first <= trainer.iter < self._end if predicate is None else predicate(trainer):
            self._profiler = self._make()
            self._profiler.__enter__()

    def after_step(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.__exit__(None, None, None)
            path = self._write(profiler)
            logger.info("Profile of iteration %d written to %s", self.trainer.iter, path)

    def after_train(self) -> None:
        if self._profiler is not None:  # the step raised an error
            profiler, self._profiler = self._profiler, None
            profiler.__exit__(None, None, None)

    def _path(self, prefix: str, suffix: str = "") -> str:
        rank = self.trainer.comm.get_rank()
        base = str(Path(self._output_dir) / f"{prefix}-iter{self.trainer.iter}")
        if suffix:
            for other in range(1, self.trainer.comm.get_world_size()):
                claim(f"{base}-rank{other}{suffix}")
        path = base + (f"-rank{rank}" if rank and suffix else "") + suffix
        claim(path)
        return path

    def _make(self) -> Any:
        """A profiler to be entered before the step and left after it."""
        raise NotImplementedError

    def _write(self, profiler: Any) -> str:
        """Write what a profiler that was left has seen; returns where."""
        raise NotImplementedError


@HOOK_REGISTRY.register()
class TorchProfiler(_StepProfiler):
    """Profiles steps with :class:`torch.profiler.profile`, each by itself.

    Writes a folder ``profiler-tensorboard-iter<iteration>`` for TensorBoard's profiler plugin, or a file
    ``profiler-trace-iter<iteration>.json``; both open in Perfetto and chrome://tracing. A profiled step takes
    longer, and so do the times reported of it. Acts around ``run_step``, the ``before_step`` of later hooks and the
    ``after_step`` of earlier ones included. Saves nothing.

    Args:
        enable_predicate: called with the trainer before each step; whether to profile it.
        output_dir: where to write; a config's hook is given the run's folder.
        activities: what to look at, as :class:`torch.profiler.ProfilerActivity` or its names ("cpu", "cuda");
            by default all there is.
        save_tensorboard: a folder for TensorBoard, instead of a file.
        start: without a predicate: how many steps after the start of the run to begin. Default: 10.
        steps: without a predicate: how many steps to profile. Default: 3.

    Example: ``TorchProfiler(lambda trainer: 10 < trainer.iter < 20, "./output")``
    """

    def __init__(
        self,
        enable_predicate: Callable[[Any], bool] | None = None,
        output_dir: str = ".",
        *,
        activities: Sequence[ProfilerActivity | str] | None = None,
        save_tensorboard: bool = True,
        start: int | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__(enable_predicate, output_dir, start, steps)
        self._activities = None if activities is None else [_activity(one) for one in activities]
        self._save_tensorboard = save_tensorboard

    def _make(self) -> Any:
        return torch.profiler.profile(
            activities=self._activities, record_shapes=True, profile_memory=True, with_stack=True, with_flops=True
        )

    def _write(self, profiler: Any) -> str:
        if self._save_tensorboard:
            folder = self._path("profiler-tensorboard")
            worker = f"worker{self.trainer.comm.get_rank()}"
            torch.profiler.tensorboard_trace_handler(folder, worker)(profiler)
            return folder
        path = self._path("profiler-trace", ".json")
        os.makedirs(self._output_dir, exist_ok=True)
        profiler.export_chrome_trace(path)
        return path


def _activity(name: ProfilerActivity | str) -> ProfilerActivity:
    if not isinstance(name, str):
        return name
    known = ProfilerActivity.__members__
    if name.upper() not in known:
        raise ConfigError(f"TorchProfiler: there is no activity {name!r}; there are {', '.join(known).lower()}")
    return known[name.upper()]


@HOOK_REGISTRY.register()
class AutogradProfiler(_StepProfiler):
    """Profiles steps with :class:`torch.autograd.profiler.profile`: operators only, and little beside them.

    Writes ``autograd-trace-iter<iteration>.json`` (for Perfetto, chrome://tracing). Acts as :class:`TorchProfiler`
    does, which tells more; use this one where that is too heavy. Saves nothing.

    Args:
        enable_predicate: as for :class:`TorchProfiler`, and so ``output_dir``, ``start`` and ``steps``.
        output_dir: where to write.
        use_cuda: look at the GPU too, if there is one.
        start: how many steps after the start of the run to begin.
        steps: how many steps to profile.
    """

    def __init__(
        self,
        enable_predicate: Callable[[Any], bool] | None = None,
        output_dir: str = ".",
        *,
        use_cuda: bool = True,
        start: int | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__(enable_predicate, output_dir, start, steps)
        self._use_cuda = use_cuda

    def _make(self) -> Any:
        device = "cuda" if self._use_cuda and torch.cuda.is_available() else None
        return torch.autograd.profiler.profile(use_device=device)

    def _write(self, profiler: Any) -> str:
        path = self._path("autograd-trace", ".json")
        os.makedirs(self._output_dir, exist_ok=True)
        profiler.export_chrome_trace(path)
        return path


# ---------------------------------------------------------------------------- memory


@HOOK_REGISTRY.register()
class MemoryMonitor(HookBase):
    """Puts how much memory is in use, in MiB, when metrics are written; nothing waits for the device.

    Writes ``rss_mem`` (the process's resident memory, on Linux) and, once CUDA is used, ``max_mem`` (the most that
    tensors took so far) and ``reserved_mem`` (what torch's allocator holds now). Saves nothing.
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
        resident = _resident_memory()
        if resident is not None:
            values["rss_mem"] = resident / 2**20
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            values["max_mem"] = torch.cuda.max_memory_allocated() / 2**20
            values["reserved_mem"] = torch.cuda.memory_reserved() / 2**20
        trainer.storage.put_scalars(smoothing_hint=False, cur_iter=self._last, **values)


def _resident_memory() -> int | None:
    """Bytes of this process in memory; None where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


@HOOK_REGISTRY.register()
class TorchMemoryStats(HookBase):
    """Logs what CUDA's memory is used for: a line each time, and the first time torch's full table.

    Acts in ``after_step`` and puts no metrics (:class:`MemoryMonitor` does); peaks are those since the start of the
    process. Without CUDA it does nothing but say so. Saves nothing.

    Args:
        period: a duration.
        max_runs: how often at most.
    """

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
        logger.info(
            "GPU memory at iteration %d, in MiB: allocated %.0f (peak %.0f), reserved %.0f (peak %.0f)",
            self.trainer.iter,
            *(
                amount() / 2**20
                for amount in (
                    cuda.memory_allocated,
                    cuda.max_memory_allocated,
                    cuda.memory_reserved,
                    cuda.max_memory_reserved,
                )
            ),
        )
        if self._runs == 1:
            logger.info("\n%s", cuda.memory_summary())


# ---------------------------------------------------------------------------- garbage

# Every so many collections are of all generations: what is frozen is left out, so there is little to look through.
_FULL = 10


@HOOK_REGISTRY.register()
class GarbageCollection(HookBase):
    """Collects Python's garbage between steps, at the same ones on all ranks, instead of whenever Python likes.

    A collection in the middle of a step makes it longer, and with many ranks each one's pauses are everybody's.
    At the start garbage is collected, what remains is frozen (no collection looks at it again) and automatic
    collection is switched off. Then, in ``after_step``, young objects are collected every ``period``, and every
    tenth time all of them. In ``after_train`` everything is as it was before. Puts and saves nothing.

    Args:
        period: a duration.
        freeze: whether to freeze what is there at the start.
    """

    single = True

    def __init__(self, period: "Duration | int | str" = 100, freeze: bool = True) -> None:
        self._every = Every(period)
        self._freeze = freeze
        self._collections = 0
        self._started = self._was_enabled = self._unfreeze = False

    def before_train(self) -> None:
        self._every.start()
        self._collections = 0
        self._started, self._was_enabled = True, gc.isenabled()
        gc.collect()
        self._unfreeze = self._freeze and gc.get_freeze_count() == 0
        if self._freeze:
            gc.freeze()
        gc.disable()

    def after_step(self) -> None:
        if self._every(self.trainer):
            self._collections += 1
            gc.collect(1 if self._collections % _FULL else 2)

    def after_train(self) -> None:
        if not self._started:
            return
        self._started = False
        if self._unfreeze:  # unless somebody else had frozen objects before
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
