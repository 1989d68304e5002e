"""A file that goes to the disk while it is being written, and whose checksums are computed meanwhile."""

import os
import queue
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

__all__ = ["DiskWriter", "Span"]

Span = tuple[int, int]
"""Where bytes begin in a file, and how many they are."""

_LARGE = 1 << 20
# Written at once; larger pieces take several times longer, beside a thread that brings others to the disk.
_PIECE = 1 << 23
# Brought to the disk at once.
_STEP = 1 << 25
_PAGE = 1 << 16  # no system's are larger


class DiskWriter:
    """What ``torch.save`` can write to. Of each large write it keeps the checksum.

    A large file is not left to the system's cache, to be brought to the disk at the end: every 32 MB that is begun, on
    a thread of its own, and what is on the disk is let go of. So memory that others need is not taken, and writing
    does not wait for memory: on some machines that took longer than the writing.

    Args:
        file: an empty local file, opened for writing.

    Attributes:
        checksums: CRC32 of each large write, by its place.
        error: the first error; after it nothing more is written.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._position = 0
        self.checksums: dict[Span, int] = {}
        self.error: OSError | None = None
        self._summing, self._syncing = _Worker("hookline-checksum"), _Worker("hookline-sync")
        self._written: list[Span] = []  # large writes that are not on the disk yet
        self._since = 0

    def write(self, content: Any) -> int:
        """Write bytes, or anything that shows its memory as such.

        Raises:
            OSError: it failed, or something did before.
        """
        if self.error is not None:  # torch goes on to write the end of a file that has failed
            raise self.error
        view = memoryview(content).cast("B")
        if len(view) < _LARGE:
            self._write(view)
            return len(view)
        place, summed = (self._position, len(view)), threading.Event()

        def add() -> None:
            self.checksums[place] = zlib.crc32(view)
            summed.set()

        self._summing.do(add)
        try:
            for start in range(0, len(view), _PIECE):
                self._write(view[start : start + _PIECE])
        finally:
            summed.wait()  # the memory may be somebody else's afterwards
        return len(view)

    def flush(self) -> None:
        """Hand what is still here to the system."""
        if self.error is None:
            self._file.flush()

    def finish(self) -> None:
        """Wait until all is on the disk.

        Raises:
            OSError: it is not.
        """
        self.close()
        if self.error is not None:
            raise self.error
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._since != self._position:
            self._let_go(self._written)

    def close(self) -> None:
        """End the threads; the file is not closed."""
        self._summing.end()
        self._syncing.end()

    def _write(self, view: memoryview) -> None:
        if self.error is not None:
            raise self.error
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error
            raise
        if len(view) >= _LARGE:
            self._note(len(view))
        self._position += len(view)
        self._since += len(view)
        if self._since >= _STEP:
            written, self._written, self._since = self._written, [], 0
            self._syncing.do(lambda: self._sync(written))

    def _note(self, size: int) -> None:
        """A large piece was written."""
        start = self._position
        if self._written and sum(self._written[-1]) == start:
            start, before = self._written.pop()
            size += before
        self._written.append((start, size))

    def _sync(self, written: list[Span]) -> None:
        try:
            getattr(os, "fdatasync", os.fsync)(self._file.fileno())
        except OSError as error:  # told of only once by the system
            self.error = self.error or error
        else:
            self._let_go(written)

    def _let_go(self, spans: list[Span]) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        for start, size in spans:
            # Not of the ends: what stands between two large writes may be changed once more.
            if size > 2 * _PAGE:
                with suppress(OSError):  # a file system that takes no advice
                    os.posix_fadvise(self._file.fileno(), start + _PAGE, size - 2 * _PAGE, os.POSIX_FADV_DONTNEED)


class _Worker:
    """A thread that does what it is given, one after the other; started when there is something.

    Not an executor: those take no work while the interpreter is ending, when a last save may still be on its way.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            # A daemon: whoever saves waits for it, and one that is forgotten must not keep the program from ending.
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def end(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
