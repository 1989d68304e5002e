"""Start the worker processes of a loader."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from ...hooks.control.interruption import STOP_SIGNALS, announce_exit_to_workers, leave_signals_to_parent

__all__ = ["WorkerLoader", "swapped"]

# The queues of each iterator. An error keeps an iterator in a reference cycle. When the garbage collector frees both
# together, it closes the queues first, and the iterator waits 5 s for each worker that it can no longer tell to end.
_queues: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


class WorkerLoader(DataLoader[Any]):
    """A DataLoader whose workers leave signals to the training process.

    Until ``worker_init_fn`` runs, SIGTERM would end a worker. Workers therefore start with the signals blocked, and
    unblock them after setting the handlers of :func:`leave_signals_to_parent`.
    """

    def __iter__(self) -> Any:
        if not self.num_workers or getattr(self, "_iterator", None) is not None:  # persistent workers are running
            return super().__iter__()
        announce_exit_to_workers()
        with swapped(self, worker_init_fn=_Init(self.worker_init_fn)), _blocked_signals():
            batches: Any = super().__iter__()
        _queues[batches] = [*batches._index_queues, batches._worker_result_queue]
        for worker in batches._workers:
            worker.terminate = worker.kill  # the last resort of the loader; the workers defer SIGTERM
        return batches


class _Init:
    """A ``worker_init_fn`` that sets the signal handlers first."""

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
    """Block the signals that end a run, in this thread and in processes that it starts. They are delivered later."""
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
    """Replace attributes of a loader temporarily, while it makes its iterator and workers."""
    own = {name: getattr(loader, name) for name in attributes}
    loader.__dict__.update(attributes)  # DataLoader's __setattr__ refuses to change the data set
    try:
        yield
    finally:
        loader.__dict__.update(own)
