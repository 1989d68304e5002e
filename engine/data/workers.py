"""Starting a loader's worker processes."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from ...hooks.control.interruption import STOP_SIGNALS, announce_exit_to_workers, leave_signals_to_parent

__all__ = ["WorkerLoader", "swapped"]


class WorkerLoader(DataLoader[Any]):
    """A DataLoader whose workers leave signals to the process that trains, from their first moment on.

    torch's own handler, which a worker has until ``worker_init_fn`` is called, ends it at SIGTERM. So workers start
    with the signals blocked, and unblock them when they have the handlers of :func:`leave_signals_to_parent`.
    """

    def __iter__(self) -> Any:
        if not self.num_workers or getattr(self, "_iterator", None) is not None:  # persistent workers are there
            return super().__iter__()
        announce_exit_to_workers()
        with swapped(self, worker_init_fn=_Init(self.worker_init_fn)), _blocked_signals():
            return super().__iter__()


class _Init:
    """A ``worker_init_fn`` that sets the signals' handlers first."""

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        leave_signals_to_parent()
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self._then is not None:
            self._then(worker_id)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block the signals that end a run, in this thread and in the processes that it starts. They come afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def swapped(loader: Any, **attributes: Any) -> Iterator[None]:
    """Have a loader make its iterator (and with it its workers) of other parts than it shows to users."""
    own = {name: getattr(loader, name) for name in attributes}
    loader.__dict__.update(attributes)  # DataLoader refuses to have its data set changed
    try:
        yield
    finally:
        loader.__dict__.update(own)
