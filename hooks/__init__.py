"""What happens around each step: hooks, the storage metrics travel through, the writers they leave by."""

from .base import EVENTS, HOOK_REGISTRY, CallbackHook, Every, HookBase, StopTraining
from .checkpoint import BestCheckpointer, PeriodicCheckpointer
from .console import CommonMetricPrinter
from .evaluation import EvalHook
from .events import EventStorage, get_event_storage, has_event_storage
from .guards import SignalHandler
from .history import HistoryBuffer
from .schedule import LRScheduler
from .timing import IterationTimer
from .writers import WRITER_REGISTRY, EventWriter, JSONWriter, PeriodicWriter, TensorboardXWriter

__all__ = [
    "EVENTS",
    "HOOK_REGISTRY",
    "WRITER_REGISTRY",
    "BestCheckpointer",
    "CallbackHook",
    "CommonMetricPrinter",
    "EvalHook",
    "EventStorage",
    "EventWriter",
    "Every",
    "HistoryBuffer",
    "HookBase",
    "IterationTimer",
    "JSONWriter",
    "LRScheduler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "SignalHandler",
    "StopTraining",
    "TensorboardXWriter",
    "get_event_storage",
    "has_event_storage",
]
