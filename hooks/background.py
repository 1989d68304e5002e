"""A thread for the work that no step should wait for."""

import queue
import threading
from collections.abc import Callable

__all__ = ["Background"]


class Background:
    """Runs jobs one after the other on a thread of its own, in the order they were given.

    The thread starts with the first job and ends with :meth:`close`; then a new one may start. An error of a job is
    raised by the next call here, in the thread that calls; the jobs behind it are still done.

    Args:
        max_jobs: how many may wait; whoever gives more waits for room.
    """

    def __init__(self, max_jobs: int = 64) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(max_jobs)
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Have ``job()`` called soon."""
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hookline-writers", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until all jobs are done."""
        self._jobs.join()
        self._raise()

    def close(self) -> None:
        """Wait until all jobs are done, and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._raise()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._errors.append(error)
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def _raise(self) -> None:
        if self._errors:
            error, *others = self._errors
            self._errors = []
            for other in others:
                error.add_note(f"then also: {type(other).__name__}: {other}")
            raise error
