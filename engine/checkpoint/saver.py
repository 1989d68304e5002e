"""Writes files one at a time, in place or on a thread, and handles errors."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ...config.files.write_error import OnError, WriteError, check_on_error
from .staging import Staging

__all__ = ["CheckpointError", "OnError", "Saver", "Then"]

logger = logging.getLogger(__name__)

RETRY_AFTER = 1.0
"""Seconds before a failed write is retried."""


class CheckpointError(WriteError):
    """A checkpoint could not be written. The message has the path, the cause and what to do. Earlier files remain."""

    verb = "save"


Then = Callable[[CheckpointError | None], Any]
"""Called with None when a file is written, or with the error that prevented it."""


class Saver:
    """Writes files, one at a time. Only the training thread calls its methods.

    A write that fails with an OSError is retried once. Then :meth:`write` reports the error. If ``asynchronous``, the
    first method called after the write has ended does.

    Args:
        asynchronous: write on a thread.
        on_error: "stop" raises an OSError as a CheckpointError, "continue" logs it. Other errors are always raised.
    """

    def __init__(self, asynchronous: bool = False, on_error: OnError = "stop") -> None:
        check_on_error(on_error)
        self.asynchronous = asynchronous
        self.on_error = on_error
        self._staging = Staging()
        self.pending: _Write | None = None
        """The write whose result is not reported yet."""

    def keep(self, data: Any) -> Any:
        """Return plain data for the next write; if it is asynchronous, a copy that training does not change."""
        return self._staging.copy(data) if self.asynchronous else data

    def write(self, path: str, write: Callable[[], Any], then: Then | None = None) -> None:
        """Wait for the previous write, call ``write()``, which writes ``path``, then call ``then``.

        Raises:
            CheckpointError: this write or the previous one failed; ``then`` was called.
        """
        self.wait()

        def write_kept() -> None:
            self._staging.wait()
            write()

        job = _Write(path, write_kept, then)
        if self.asynchronous:
            job.start()
            self.pending = job
        else:
            job.run()
            self._end(job)

    def poll(self) -> None:
        """Report a write that has ended. Does not wait.

        Raises:
            CheckpointError: the write failed.
        """
        if self.pending is not None and not self.pending.is_alive():
            self._end(self.pending)

    def wait(self) -> None:
        """Wait for the pending write and report it.

        Raises:
            CheckpointError: the write failed.
        """
        if self.pending is not None:
            self.pending.join()
            self._end(self.pending)

    def close(self) -> None:
        """Call :meth:`wait`, and free the memory of copies."""
        try:
            self.wait()
        finally:
            self._staging.free()

    def _end(self, ended: "_Write") -> None:
        self.pending = None
        error = ended.error
        if error is not None and not isinstance(error, OSError):
            raise error
        failure = None if error is None else CheckpointError.of(ended.path, error)
        if failure is not None and self.on_error == "continue":
            logger.error(
                "Training continues without this checkpoint; the next one is saved when it is due: %s", failure
            )
        if ended.then is not None:
            ended.then(failure)
        if failure is not None and self.on_error == "stop":
            raise failure from error


class _Write(threading.Thread):
    """Writes one file. Not a daemon: the program waits for it before it exits."""

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
                logger.warning("Retrying once: %s", CheckpointError.of(self.path, error))
                time.sleep(RETRY_AFTER)
                self._write()
        except BaseException as error:
            self.error = error
        finally:
            self._write = None  # releases the copy of the state
