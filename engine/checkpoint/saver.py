"""Files written one at a time, in place or on a thread, and what becomes of those that fail."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ...config.files.write_error import OnError, WriteError, check_on_error

__all__ = ["CheckpointError", "OnError", "Saver", "Then"]

logger = logging.getLogger(__name__)

RETRY_AFTER = 1.0
"""Seconds after which a write that failed is tried again."""


class CheckpointError(WriteError):
    """A checkpoint could not be written: the path, the cause, and what to do. What was there is unchanged."""

    verb = "save"


Then = Callable[[CheckpointError | None], Any]
"""Called when a file was written, with None, or when it could not be, with the error."""


class Saver:
    """Writes files, one at a time. All methods are for one thread, the one that trains.

    A write that fails with an OSError is tried once more. What then comes of it is told by the method during which
    it is known: by :meth:`write` itself, or if ``asynchronous`` by whatever is called next after it has ended.

    Args:
        asynchronous: write on a thread.
        on_error: whether such an error is raised, as a CheckpointError, or logged. Others are raised in any case.
    """

    def __init__(self, asynchronous: bool = False, on_error: OnError = "stop") -> None:
        check_on_error(on_error)
        self.asynchronous = asynchronous
        self.on_error = on_error
        self.pending: _Write | None = None
        """The write that has not been told of."""

    def write(self, path: str, write: Callable[[], Any], then: Then | None = None) -> None:
        """Have ``write()`` called, which writes ``path``, and ``then`` when that is done; waits for the one before.

        Raises:
            CheckpointError: it failed, or the one before did; ``then`` was called.
        """
        self.wait()
        job = _Write(path, write, then)
        if self.asynchronous:
            job.start()
            self.pending = job
        else:
            job.run()
            self._end(job)

    def poll(self) -> None:
        """Tell of a write that has ended; does not wait.

        Raises:
            CheckpointError: it failed.
        """
        if self.pending is not None and not self.pending.is_alive():
            self._end(self.pending)

    @property
    def has_failed(self) -> bool:
        """Whether the write that has not been told of has ended with an error."""
        return self.pending is not None and not self.pending.is_alive() and self.pending.error is not None

    def wait(self) -> None:
        """Wait for the write that is on its way, and tell of it.

        Raises:
            CheckpointError: it failed.
        """
        if self.pending is not None:
            self.pending.join()
            self._end(self.pending)

    def _end(self, ended: "_Write") -> None:
        self.pending = None
        error = ended.error
        if error is not None and not isinstance(error, OSError):
            raise error
        failure = None if error is None else CheckpointError.of(ended.path, error)
        if failure is not None and self.on_error == "continue":
            logger.error("Training goes on without a checkpoint, and the next save tries again: %s", failure)
        if ended.then is not None:
            ended.then(failure)
        if failure is not None and self.on_error == "stop":
            raise failure from error


class _Write(threading.Thread):
    """One file's way to the disk. Not a daemon: a program that ends waits for it."""

    def __init__(self, path: str, write: Callable[[], Any], then: Then | None) -> None:
        super().__init__(name="hookline-checkpoint")
        self.path = path
        self.then = then
        self.error: BaseException | None = None
        self._write: Callable[[], Any] | None = write

    def run(self) -> None:
        assert self._write is not None
        try:
            try:
                self._write()
            except OSError as error:
                logger.warning("Trying once more: %s", CheckpointError.of(self.path, error))
                time.sleep(RETRY_AFTER)
                self._write()
        except BaseException as error:
            self.error = error
        finally:
            self._write = None  # and with it the copy of the state
