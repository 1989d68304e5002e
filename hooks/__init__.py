"""Hooks, the storage that collects metrics, and the writers that report them.

What a usual run does not need is imported when it is used.
"""

from typing import TYPE_CHECKING

from ..config.rare_names import imported_when_used
from .base import EVENTS, HOOK_REGISTRY, STEP_EVENTS, Every, HookBase, StopTraining
from .checkpoints.best import BestCheckpointer
from .checkpoints.periodic import ExceptionCheckpointer, PeriodicCheckpointer, RollingCheckpointer
from .control.interruption import SignalHandler, StopSignals, TimeLimit
from .control.lr_scheduler import LRScheduler
from .evaluation import EvalHook
from .event_storage import _CURRENT_STORAGE_STACK as _CURRENT_STORAGE_STACK
from .event_storage import EventStorage, get_event_storage, has_event_storage
from .functions import CallbackHook, FunctionHook
from .history_buffer import HistoryBuffer
from .hook_list import HookOrderError, check_hooks
from .watching.timing import IterationTimer, Throughput
from .writers.bars import LivePlot, ProgressBar
from .writers.base import WRITER_REGISTRY, CommonMetricPrinter, EventWriter, RowWriter
from .writers.files import CSVWriter, JSONWriter
from .writers.periodic import PeriodicWriter
from .writers.tensorboard import TensorboardXWriter

if TYPE_CHECKING:
    from .control.accumulation import GradientAccumulationScheduler
    from .control.early_stopping import EarlyStopping
    from .control.loss_spike import LossSpike
    from .watching.flops import FlopsCounter
    from .watching.memory import GarbageCollection, MemoryMonitor, MemorySnapshot, TorchMemoryStats
    from .watching.profilers import AutogradProfiler, TorchProfiler
    from .watching.samples import SamplePredictions
    from .weights.averaging import EMA, EMAHook, WeightAveraging
    from .weights.freezing import ModelFreezer
    from .weights.precise_bn import PreciseBN
    from .weights.swa import SWA
    from .writers.trackers import MLflowWriter, TrackerWriter, WandbWriter

__all__ = [
    "EMA",
    "EVENTS",
    "HOOK_REGISTRY",
    "STEP_EVENTS",
    "SWA",
    "WRITER_REGISTRY",
    "AutogradProfiler",
    "BestCheckpointer",
    "CSVWriter",
    "CallbackHook",
    "CommonMetricPrinter",
    "EMAHook",
    "EarlyStopping",
    "EvalHook",
    "EventStorage",
    "EventWriter",
    "Every",
    "ExceptionCheckpointer",
    "FlopsCounter",
    "FunctionHook",
    "GarbageCollection",
    "GradientAccumulationScheduler",
    "HistoryBuffer",
    "HookBase",
    "HookOrderError",
    "IterationTimer",
    "JSONWriter",
    "LRScheduler",
    "LivePlot",
    "LossSpike",
    "MLflowWriter",
    "MemoryMonitor",
    "MemorySnapshot",
    "ModelFreezer",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "PreciseBN",
    "ProgressBar",
    "RollingCheckpointer",
    "RowWriter",
    "SamplePredictions",
    "SignalHandler",
    "StopSignals",
    "StopTraining",
    "TensorboardXWriter",
    "Throughput",
    "TimeLimit",
    "TorchMemoryStats",
    "TorchProfiler",
    "TrackerWriter",
    "WandbWriter",
    "WeightAveraging",
    "check_hooks",
    "get_event_storage",
    "has_event_storage",
]

__getattr__ = imported_when_used(
    __name__,
    {
        "AutogradProfiler": ".watching.profilers",
        "EMA": ".weights.averaging",
        "EMAHook": ".weights.averaging",
        "EarlyStopping": ".control.early_stopping",
        "FlopsCounter": ".watching.flops",
        "GarbageCollection": ".watching.memory",
        "GradientAccumulationScheduler": ".control.accumulation",
        "LossSpike": ".control.loss_spike",
        "MLflowWriter": ".writers.trackers",
        "MemoryMonitor": ".watching.memory",
        "MemorySnapshot": ".watching.memory",
        "ModelFreezer": ".weights.freezing",
        "PreciseBN": ".weights.precise_bn",
        "SWA": ".weights.swa",
        "SamplePredictions": ".watching.samples",
        "TorchMemoryStats": ".watching.memory",
        "TorchProfiler": ".watching.profilers",
        "TrackerWriter": ".writers.trackers",
        "WandbWriter": ".writers.trackers",
        "WeightAveraging": ".weights.averaging",
    },
)


def __dir__() -> list[str]:
    return __all__
