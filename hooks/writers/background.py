"""A thread for the work that no step should wait for."""

import threading
from collections.abc import Callable

__all__ = ["Background"]


class Background:
    """Runs jobs one after the other on a thread of its own, in the order they were given.

    Jobs gather for a moment and are then done together: a thread that wakes up takes Python's lock from the one that
    trains, which costs more than a small job does. The thread starts with the first job and ends with :meth:`close`;
    then a new one may start. An error of a job is raised by the next call here, in the thread that calls; the jobs
    behind it are still done, and so is the one that this call gives.

    Args:
        max_jobs: how many may wait; whoever gives more waits until they are fewer.
        delay: seconds that the first of them waits for others; :meth:`drain`, :meth:`close` and a full queue end it.
    """

    def __init__(self, max_jobs: int = 1024, delay: float = 0.5) -> None:
        self._max_jobs = max_jobs
        self._delay = delay
        self._jobs: list[Callable[[], None]] = []
        # All below is read and changed under this lock; whoever changes it notifies those who wait for it.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []
        self._busy = False  # jobs were taken, and are not all done
        self._hurry = False  # somebody waits: no delay
        self._closing = False

    def submit(self, job: Callable[[], None]) -> None:
        """Have ``job()`` called soon, also if this raises."""
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="hookline-writers", daemon=True)
                self._thread.start()
            self._jobs.append(job)  # first of all: whoever waits may be interrupted, and the job is to be done
            if len(self._jobs) == 1:  # the thread sleeps until there is one
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
        """Wait until all jobs are done, and end the thread. One that is interrupted may be followed by any call."""
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
        """Wait for jobs, and take all there are; none when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            self._changed.wait_for(lambda: self._hurry or self._closing, self._delay)
            jobs, self._jobs = self._jobs, []
            self._busy, self._hurry = bool(jobs), False
            if not jobs:
                self._thread = None  # said under the lock, so that no job is left to a thread that is ending
            self._changed.notify_all()
            return jobs

    def _raise(self) -> None:
        with self._changed:
            errors, self._errors = self._errors, []
        if errors:
            error, *others = errors
            for other in others:
                error.add_note(f"then also: {type(other).__name__}: {other}")
            raise error
