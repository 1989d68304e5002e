"""Loader workers: they outlive signals of the job, and end with the training process."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from ...hooks.builtin.interruption import STOP_SIGNALS
from .. import comm
from .seeding import seeded_generator

# The queues of each iterator. An error keeps an iterator in a reference cycle. When the garbage collector frees both
# together, it closes the queues first, and the iterator waits 5 s for each worker that it can no longer tell to end.
_queues: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
# The process that kills its workers when it exits. A fork does not inherit what its parent has registered.
_killer = 0


class WorkerLoader(DataLoader[Any]):
    """A DataLoader with a seed, whose workers ignore signals: the training process decides when they end.

    Schedulers and terminals send signals to all processes of a job. If a worker ended, the step that is being finished
    would fail.

    Args:
        dataset: any.
        seed: seed of the run, the same on all ranks.
        **options: as for DataLoader. With the generator, by default one of seed and rank, a loader does not draw from
            the global one when it starts.
    """

    def __init__(self, dataset: Any, *, seed: int, **options: Any) -> None:
        if options.get("generator") is None:
            options["generator"] = seeded_generator(seed, comm.get_data_rank())
        super().__init__(dataset, **options)
        self.seed = seed

    def _get_iterator(self) -> Any:
        global _killer
        if not self.num_workers:
            return super()._get_iterator()
        # A signal would end a worker until it runs worker_init_fn, so workers start with the signals blocked.
        with _signals_blocked(), swapped(self, worker_init_fn=partial(_begin_worker, self.worker_init_fn)):
            batches: Any = super()._get_iterator()
        _queues[batches] = [*batches._index_queues, batches._worker_result_queue]
        for worker in batches._workers:
            worker.terminate = worker.kill  # the last resort of the loader
        if _killer != os.getpid():
            _killer = os.getpid()
            # Before multiprocessing sends SIGTERM to the processes that are left, and waits for them.
            Finalize(None, _kill_workers, exitpriority=100)
        return batches


@contextmanager
def swapped(loader: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a loader temporarily, while it makes its iterator and workers."""
    own = {name: getattr(loader, name) for name in attributes}
    loader.__dict__.update(attributes)  # DataLoader's __setattr__ refuses to change the data set
    try:
        yield
    finally:
        loader.__dict__.update(own)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Make this process ignore SIGINT, SIGTERM and SIGUSR1, and exit when its parent ends, however that ends.

    torch's own check of the parent starts later in a worker, and may miss that.
    """

    def exit_with_parent() -> None:
        parent.join()  # type: ignore[union-attr]
        os._exit(0)

    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # a program that the data set starts would inherit SIG_IGN
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=exit_with_parent, name="hookline-parent", daemon=True).start()


def _begin_worker(then: Callable[[int], Any] | None, worker_id: int) -> None:
    ignore_signals()
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if then is not None:
        then(worker_id)


def _kill_workers() -> None:
    alive = {*multiprocessing.active_children()}
    for batches in list(_queues):
        if workers := alive.intersection(batches._workers):
            batches._worker_pids_set = False
            _remove_worker_pids(id(batches))  # otherwise torch reports an error for each
            for worker in workers:
                worker.kill()
