"""A thread for work that training does not wait for."""

import threading
from collections.abc import Callable, Sequence

__all__ = ["Background", "raise_all"]


class Background:
    """Runs jobs on one thread, in the order they are submitted.

    Jobs are collected for a moment and run together: each wake-up of the thread takes Python's lock from the training
    thread, which costs more than a small job. The first job starts the thread; after :meth:`close` a new job starts a
    new one. The next call of any method raises the errors of jobs; later jobs still run.

    Args:
        max_jobs: how many jobs may wait; :meth:`submit` blocks while there are more.
        delay: seconds that the first job waits for others. :meth:`drain`, :meth:`close` and a full queue end the wait.
    """

    def __init__(self, max_jobs: int = 1024, delay: float = 0.5) -> None:
        self._max_jobs = max_jobs
        self._delay = delay
        self._jobs: list[Callable[[], None]] = []
        # This lock guards everything below; each change notifies the threads that wait for it.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []
        self._busy = False  # jobs are running
        self._hurry = False  # a caller waits: no delay
        self._closing = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job()`` soon. It runs even if this call raises an earlier job's error."""
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="hookline-writers", daemon=True)
                self._thread.start()
            self._jobs.append(job)  # first: the wait below may be interrupted
            if len(self._jobs) == 1:  # the thread sleeps until there is a job
                self._changed.notify_all()
            if len(self._jobs) > self._max_jobs:
                self._wait_until(lambda: len(self._jobs) <= self._max_jobs)
        self._raise()

    def drain(self) -> None:
        """Wait until all jobs are done."""
        with self._changed:
            self._wait_until(lambda: not self._jobs and not self._busy)
        self._raise()

    def close(self) -> None:
        """Wait until all jobs are done, and end the thread. If interrupted, any method may be called again."""
        thread = self._thread
        if thread is not None:
            try:
                with self._changed:
                    self._closing = self._hurry = True
                    self._changed.notify_all()
                thread.join()
            finally:
                with self._changed:
                    self._closing = False
        self._raise()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._hurry = bool(self._jobs)
            self._changed.notify_all()
            self._changed.wait()

    def _work(self) -> None:
        while jobs := self._take():
            for job in jobs:
                try:
                    job()
                except BaseException as error:
                    with self._changed:
                        self._errors.append(error)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _take(self) -> list[Callable[[], None]]:
        """Wait for jobs and take all of them; return none when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            self._changed.wait_for(lambda: self._hurry or self._closing, self._delay)
            jobs, self._jobs = self._jobs, []
            self._busy, self._hurry = bool(jobs), False
            if not jobs:
                self._thread = None  # under the lock, so that no job goes to a thread that is ending
            self._changed.notify_all()
            return jobs

    def _raise(self) -> None:
        with self._changed:
            errors, self._errors = self._errors, []
        raise_all(errors)


def raise_all(errors: Sequence[BaseException]) -> None:
    """Raise the first error, with the others as notes. Do nothing if there are none."""
    for other in errors[1:]:
        errors[0].add_note(f"then also: {type(other).__name__}: {other}")
    if errors:
        raise errors[0]
