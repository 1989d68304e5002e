"""What happens around each step: hooks, the storage metrics travel through, the writers they leave by."""

from .base import EVENTS, HOOK_REGISTRY, STEP_EVENTS, CallbackHook, Every, HookBase, StopTraining
from .checkpoint import BestCheckpointer, PeriodicCheckpointer
from .console import CommonMetricPrinter
from .evaluation import EarlyStopping, EvalHook, SanityCheck
from .events import EventStorage, get_event_storage, has_event_storage
from .functions import FunctionHook, off, on
from .guards import SignalHandler
from .history import HistoryBuffer
from .host import HookHost
from .order import HookOrderError, check_hooks
from .schedule import LRScheduler
from .timing import IterationTimer
from .writers import WRITER_REGISTRY, EventWriter, JSONWriter, PeriodicWriter, RowWriter, TensorboardXWriter

__all__ = [
    "EVENTS",
    "HOOK_REGISTRY",
    "STEP_EVENTS",
    "WRITER_REGISTRY",
    "BestCheckpointer",
    "CallbackHook",
    "CommonMetricPrinter",
    "EarlyStopping",
    "EvalHook",
    "EventStorage",
    "EventWriter",
    "Every",
    "FunctionHook",
    "HistoryBuffer",
    "HookBase",
    "HookHost",
    "HookOrderError",
    "IterationTimer",
    "JSONWriter",
    "LRScheduler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "RowWriter",
    "SanityCheck",
    "SignalHandler",
    "StopTraining",
    "TensorboardXWriter",
    "check_hooks",
    "get_event_storage",
    "has_event_storage",
    "off",
    "on",
]
