"""What happens around each step: hooks, the storage metrics travel through, the writers they leave by."""

from .base import EVENTS, HOOK_REGISTRY, STEP_EVENTS, CallbackHook, Every, HookBase, StopTraining
from .checkpoint import BestCheckpointer, PeriodicCheckpointer
from .console import CommonMetricPrinter
from .csv_writer import CSVWriter
from .evaluation import EarlyStopping, EvalHook, SanityCheck
from .events import EventStorage, get_event_storage, has_event_storage
from .flops import FlopsCounter
from .functions import FunctionHook, off, on
from .guards import SignalHandler
from .history import HistoryBuffer
from .host import HookHost
from .order import HookOrderError, check_hooks
from .profiling import AutogradProfiler, GarbageCollection, MemoryMonitor, TorchMemoryStats, TorchProfiler
from .schedule import LRScheduler
from .spikes import LossSpike
from .throughput import Throughput
from .timing import IterationTimer
from .writers import WRITER_REGISTRY, EventWriter, JSONWriter, PeriodicWriter, RowWriter, TensorboardXWriter

__all__ = [
    "EVENTS",
    "HOOK_REGISTRY",
    "STEP_EVENTS",
    "WRITER_REGISTRY",
    "AutogradProfiler",
    "BestCheckpointer",
    "CSVWriter",
    "CallbackHook",
    "CommonMetricPrinter",
    "EarlyStopping",
    "EvalHook",
    "EventStorage",
    "EventWriter",
    "Every",
    "FlopsCounter",
    "FunctionHook",
    "GarbageCollection",
    "HistoryBuffer",
    "HookBase",
    "HookHost",
    "HookOrderError",
    "IterationTimer",
    "JSONWriter",
    "LRScheduler",
    "LossSpike",
    "MemoryMonitor",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "RowWriter",
    "SanityCheck",
    "SignalHandler",
    "StopTraining",
    "TensorboardXWriter",
    "Throughput",
    "TorchMemoryStats",
    "TorchProfiler",
    "check_hooks",
    "get_event_storage",
    "has_event_storage",
    "off",
    "on",
]
