"""Profilers of steps."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from ...config import ConfigError
from ..base import HOOK_REGISTRY, HookBase
from ..common import run_folder
from ..protocol import TrainerProtocol

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class TorchProfiler(HookBase):
    """Profiles steps with :class:`torch.profiler.profile`, each separately.

    Writes a folder ``profiler-tensorboard-iter<iteration>`` for TensorBoard's profiler plugin, or a file
    ``profiler-trace-iter<iteration>.json``; both open in Perfetto and chrome://tracing. A profiled step is slower, and
    so are its reported times. The profile covers ``run_step``, ``before_step`` of later hooks and ``after_step`` of
    earlier hooks. Saves nothing.

    Args:
        enable_predicate: called with the trainer before each step; returns whether to profile it.
        output_dir: where to write. Default: the run's folder, or the current one if the trainer has no config.
        activities: what to profile; None: everything available.
        save_tensorboard: whether to write a folder for TensorBoard instead of a file.
        start: without a predicate: how many steps to skip from the start of the run. Default: 10.
        steps: without a predicate: how many steps to profile. Default: 3.

    Example: ``TorchProfiler(lambda trainer: 10 < trainer.iter < 20, "./output")``
    """

    _trace = "profiler-trace"

    def __init__(
        self,
        enable_predicate: Callable[[TrainerProtocol], bool] | None = None,
        output_dir: str | None = None,
        *,
        activities: Sequence[ProfilerActivity] | None = None,
        save_tensorboard: bool = True,
        start: int | None = None,
        steps: int | None = None,
    ) -> None:
        if enable_predicate is not None and (start is not None or steps is not None):
            raise ConfigError(f"{type(self).__name__} takes enable_predicate, or start and steps, not both")
        self._enable_predicate = enable_predicate
        self._output_dir = output_dir
        self._activities = activities
        self._save_tensorboard = save_tensorboard
        self._start = 10 if start is None else start
        self._steps = 3 if steps is None else steps
        self._profiler: Any = None

    def before_step(self) -> None:
        trainer, predicate = self.trainer, self._enable_predicate
        first = trainer.start_iter + self._start
        if first <= trainer.iter < first + self._steps if predicate is None else predicate(trainer):
            self._profiler = self._make()
            self._profiler.__enter__()

    def after_step(self) -> None:
        if profiler := self._end():
            logger.info("Profile of iteration %d written to %s", self.trainer.iter, self._write(profiler))

    def after_train(self) -> None:
        self._end()  # if the step failed

    def _end(self) -> Any:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.__exit__(None, None, None)
        return profiler

    def _make(self) -> Any:
        return torch.profiler.profile(
            activities=self._activities, record_shapes=True, profile_memory=True, with_stack=True, with_flops=True
        )

    def _write(self, profiler: Any) -> str:
        """Write the profile and return its path."""
        rank, output_dir = self.trainer.comm.get_rank(), self._output_dir or run_folder(self.trainer) or "."
        if self._save_tensorboard:
            folder = str(Path(output_dir) / f"profiler-tensorboard-iter{self.trainer.iter}")
            torch.profiler.tensorboard_trace_handler(folder, f"worker{rank}")(profiler)
            return folder
        base = str(Path(output_dir) / f"{self._trace}-iter{self.trainer.iter}")
        path = f"{base}-rank{rank}.json" if rank else f"{base}.json"
        os.makedirs(output_dir, exist_ok=True)
        profiler.export_chrome_trace(path)
        return path


@HOOK_REGISTRY.register()
class AutogradProfiler(TorchProfiler):
    """Profiles the operators of steps with :class:`torch.autograd.profiler.profile`.

    Writes ``autograd-trace-iter<iteration>.json`` for Perfetto and chrome://tracing. It acts like
    :class:`TorchProfiler`, which records more and is slower. Saves nothing.

    Args:
        enable_predicate, output_dir, start, steps: as for :class:`TorchProfiler`.
        use_cuda: whether to profile the GPU too, if there is one.
    """

    _trace = "autograd-trace"

    def __init__(
        self,
        enable_predicate: Callable[[TrainerProtocol], bool] | None = None,
        output_dir: str | None = None,
        *,
        use_cuda: bool = True,
        start: int | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__(enable_predicate, output_dir, save_tensorboard=False, start=start, steps=steps)
        self._use_cuda = use_cuda

    def _make(self) -> Any:
        device = "cuda" if self._use_cuda and torch.cuda.is_available() else None
        return torch.autograd.profiler.profile(use_device=device)
