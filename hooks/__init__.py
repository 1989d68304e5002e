"""Hooks, the storage that collects metrics, and the writers that report them."""

from .base import HOOK_REGISTRY, Every, HookBase, HookOrderError, StopTraining
from .builtin.accumulation import GradientAccumulationScheduler
from .builtin.averaging import EMA, EMAHook, WeightAveraging
from .builtin.best import BestCheckpointer
from .builtin.early_stopping import EarlyStopping
from .builtin.flops import FlopsCounter
from .builtin.freezing import ModelFreezer
from .builtin.histograms import Histograms
from .builtin.interruption import SignalHandler, StopSignals, TimeLimit
from .builtin.loss_spike import LossSpike
from .builtin.lr_scheduler import LRScheduler
from .builtin.memory import GarbageCollection, MemoryMonitor, MemorySnapshot, TorchMemoryStats
from .builtin.periodic import ExceptionCheckpointer, PeriodicCheckpointer, RollingCheckpointer
from .builtin.precise_bn import PreciseBN
from .builtin.profilers import AutogradProfiler, TorchProfiler
from .builtin.samples import SamplePredictions
from .builtin.swa import SWA
from .builtin.timing import IterationTimer, Throughput
from .evaluation import EvalHook
from .event_storage import _CURRENT_STORAGE_STACK as _CURRENT_STORAGE_STACK
from .event_storage import EventStorage, get_event_storage, has_event_storage
from .functions import CallbackHook, on
from .history_buffer import HistoryBuffer
from .protocol import TrainerProtocol
from .writers.bars import LivePlot, ProgressBar
from .writers.base import WRITER_REGISTRY, CommonMetricPrinter, EventWriter, RowWriter
from .writers.files import CSVWriter, JSONWriter
from .writers.periodic import PeriodicWriter
from .writers.tensorboard import TensorboardXWriter
from .writers.trackers import MLflowWriter, TrackerWriter, WandbWriter

__all__ = [
    "EMA",
    "HOOK_REGISTRY",
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
    "GarbageCollection",
    "GradientAccumulationScheduler",
    "Histograms",
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
    "TrainerProtocol",
    "WandbWriter",
    "WeightAveraging",
    "get_event_storage",
    "has_event_storage",
    "on",
]
