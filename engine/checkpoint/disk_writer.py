"""Writes a file to disk while it is produced, and computes its checksum on the way."""

import os
import queue
import struct
import threading
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import IO, Any

__all__ = ["BlockChecksum", "DiskWriter"]

# Writes of at least this size have their checksum computed on a thread.
_LARGE = 1 << 20
# Size of one write call. Larger ones are several times slower while another thread syncs.
_PIECE = 1 << 23
# Bytes between two syncs.
_STEP = 1 << 25


class BlockChecksum:
    """Checksum of a stream of bytes: the CRC32 of the CRC32s of its 16 MiB blocks.

    Blocks can be read on several threads, which a CRC32 of the whole stream does not allow.

    Args:
        blocks: CRC32s of the stream's first blocks, if they are known.
    """

    BLOCK = 1 << 24

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self._blocks = list(blocks)
        self._crc = self._filled = 0

    def update(self, view: memoryview | bytes) -> None:
        """Add the next bytes of the stream."""
        while len(view):
            part, view = view[: self.BLOCK - self._filled], view[self.BLOCK - self._filled :]
            self._crc = zlib.crc32(part, self._crc)
            self._filled += len(part)
            if self._filled == self.BLOCK:
                self._blocks.append(self._crc)
                self._crc = self._filled = 0

    def value(self) -> int:
        """Return the checksum of all bytes so far."""
        return zlib.crc32(struct.pack(f"<{len(self._blocks) + 1}L", *self._blocks, self._crc))


class DiskWriter:
    """A file object for ``torch.save``.

    It syncs the file every 32 MB on a thread and drops synced pages from the system's cache. A large file then takes
    no memory from other processes, and writing does not wait for free memory, which on some machines takes longer
    than the write itself.

    Args:
        file: an empty local file, opened for writing.

    Attributes:
        error: the first error; nothing is written after it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None
        self._checksum = BlockChecksum()
        self._summing, self._syncing = _Worker("hookline-checksum"), _Worker("hookline-sync")
        self._written = self._synced = 0

    def write(self, content: Any) -> int:
        """Write bytes, or any object with the buffer protocol.

        Raises:
            OSError: this write or an earlier one failed.
        """
        view = memoryview(content).cast("B")
        if len(view) < _LARGE:
            self._checksum.update(view)
            self._write(view)
            return len(view)
        done = threading.Event()

        def update() -> None:
            self._checksum.update(view)
            done.set()

        self._summing.do(update)
        try:
            for start in range(0, len(view), _PIECE):
                self._write(view[start : start + _PIECE])
        finally:
            done.wait()  # the caller may free the memory afterwards
        return len(view)

    def flush(self) -> None:
        """Flush the file's own buffer."""
        if self.error is None:
            self._file.flush()

    def finish(self) -> int:
        """Wait until everything is on disk, and return the checksum.

        Raises:
            OSError: a write or sync failed.
        """
        self.close()
        if self.error is not None:
            raise self.error
        self._file.flush()
        os.fsync(self._file.fileno())
        self._drop_from_cache(self._synced, self._written)
        return self._checksum.value()

    def close(self) -> None:
        """Stop the threads. The file stays open."""
        self._summing.end()
        self._syncing.end()

    def _write(self, view: memoryview) -> None:
        if self.error is not None:  # torch writes the archive's end even after an error
            raise self.error
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error
            raise
        self._written += len(view)
        if self._written - self._synced >= _STEP:
            start, end = self._synced, self._written
            self._synced = end
            self._syncing.do(lambda: self._sync(start, end))

    def _sync(self, start: int, end: int) -> None:
        try:
            getattr(os, "fdatasync", os.fsync)(self._file.fileno())
        except OSError as error:  # the system reports it only once
            self.error = self.error or error
        else:
            self._drop_from_cache(start, end)

    def _drop_from_cache(self, start: int, end: int) -> None:
        if hasattr(os, "posix_fadvise") and end - start >= _LARGE:
            with suppress(OSError):  # not supported by the file system
                os.posix_fadvise(self._file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


class _Worker:
    """A thread that runs jobs in order. It starts with the first job.

    Not an executor: those refuse work while the interpreter shuts down, when a last save may still be running.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            # A daemon, so that a writer that is never closed cannot keep the program from ending.
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
