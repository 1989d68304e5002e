"""What happens around each step: hooks, the storage metrics travel through, the writers they leave by."""

from .averaging import EMA, EMAHook, WeightAveraging
from .base import EVENTS, HOOK_REGISTRY, STEP_EVENTS, CallbackHook, Every, HookBase, StopTraining
from .best import BestCheckpointer
from .checkpoint import ExceptionCheckpointer, PeriodicCheckpointer
from .console import CommonMetricPrinter
from .csv_writer import CSVWriter
from .evaluation import EarlyStopping, EvalHook, SanityCheck
from .events import EventStorage, get_event_storage, has_event_storage
from .flops import FlopsCounter
from .freezing import ModelFreezer
from .functions import FunctionHook, off, on
from .guards import SignalHandler, StopSignals, TimeLimit
from .history import HistoryBuffer
from .host import HookHost
from .json_writer import JSONWriter
from .order import HookOrderError, check_hooks
from .precise_bn import PreciseBN
from .profiling import AutogradProfiler, GarbageCollection, MemoryMonitor, TorchMemoryStats, TorchProfiler
from .progress import ProgressBar
from .schedule import LRScheduler
from .spikes import LossSpike
from .swa import SWA
from .tensorboard import TensorboardXWriter
from .throughput import Throughput
from .timing import IterationTimer
from .writers import WRITER_REGISTRY, EventWriter, PeriodicWriter, RowWriter

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
    "HistoryBuffer",
    "HookBase",
    "HookHost",
    "HookOrderError",
    "IterationTimer",
    "JSONWriter",
    "LRScheduler",
    "LossSpike",
    "MemoryMonitor",
    "ModelFreezer",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "PreciseBN",
    "ProgressBar",
    "RowWriter",
    "SanityCheck",
    "SignalHandler",
    "StopSignals",
    "StopTraining",
    "TensorboardXWriter",
    "Throughput",
    "TimeLimit",
    "TorchMemoryStats",
    "TorchProfiler",
    "WeightAveraging",
    "check_hooks",
    "get_event_storage",
    "has_event_storage",
    "off",
    "on",
]
