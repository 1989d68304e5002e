"""The files of checkpoints: written atomically, in place or on a thread, and verified before they are read.

``torch.save`` stores a CRC32 of each record of its zip archive, which :func:`verify_checkpoint` compares.
"""

import logging
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any

import torch
from torch.utils._pytree import tree_map_only

from ...config.errors import ConfigError, first_line, printable
from ...config.files.atomic import (
    OnError,
    WriteError,
    check_on_error,
    displaced,
    is_checkpoint_folder,
    remove_leftovers,
    replace_file,
)
from ...config.files.run_folder import claim, is_claimed

__all__ = [
    "STATE_FILE",
    "CheckpointError",
    "CheckpointFolder",
    "OnError",
    "Saver",
    "Then",
    "disk_errors",
    "is_local",
    "read_tag",
    "verify_checkpoint",
    "write_checkpoint",
]

logger = logging.getLogger(__name__)

STATE_FILE = "state.pth"
"""The file of ``torch.save`` in the folder of a sharded checkpoint."""

# Longest content of last_checkpoint that is read.
_MAX_NAME = 4096


def write_checkpoint(file: IO[bytes], data: Any) -> None:
    """Write tensors and plain data to an empty file, with ``torch.save``.

    Raises:
        OSError: the file cannot be written.
    """
    with disk_errors(file) as writer:
        torch.save(data, writer)


@contextmanager
def disk_errors(file: Any) -> Iterator[Any]:
    """Give torch a file to write, and raise the disk's error, if there is one: torch replaces it by another."""
    writer = _Writer(file)
    try:
        yield writer
    except BaseException:
        if writer.error is not None:
            raise writer.error from None
        raise


class _Writer:
    """A file object that remembers the first error of a write, and writes nothing after it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: Any) -> int:
        if self.error is not None:  # torch writes the archive's end even after an error
            raise self.error
        rest = memoryview(content).cast("B")
        size = len(rest)
        try:
            while rest:  # an unbuffered file may write less
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, getattr(self._file, "name", None))
            raise self.error from None
        return size


def verify_checkpoint(path: str) -> None:
    """Check that the content of a local file of ``torch.save`` is unchanged since it was written.

    Raises:
        ConfigError: the file is damaged or not a checkpoint; the message names the file and the problem.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"{path} {'is not a file' if os.path.exists(path) else 'does not exist'}")
    try:
        problem = _problem(path)
    except Exception as error:  # damaged bytes can cause any error
        raise ConfigError(f"{path} is damaged, or is not a checkpoint ({first_line(error)})") from error
    if problem:
        raise ConfigError(f"{path} is {problem}")


def _problem(path: str) -> str:
    """Return what is wrong with a file; empty if nothing is."""
    with open(path, "rb") as file:
        start = file.read(4)
        if not start:
            return "empty"
        if start != b"PK\x03\x04":
            return "not a checkpoint"
        if not zipfile.is_zipfile(file):  # the archive's directory is at its end
            return "damaged: it is cut short"
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if not any(record.filename.endswith("/data.pkl") for record in records):
                return "not a checkpoint, but some other archive"
            stored = all(record.compress_type == 0 and record.compress_size == record.file_size for record in records)
            if not stored or sum(record.file_size for record in records) > os.path.getsize(path):
                return "damaged: its parts overlap or are compressed"  # could take any amount of work to read
            if not any(record.CRC for record in records):  # torch.serialization.set_crc32_options(False)
                return ""
            wrong = archive.testzip()
            return f"damaged: the checksum of {printable(wrong)} is wrong" if wrong else ""


# ---------------------------------------------------------------------------- the folder


def is_local(path: str) -> bool:
    """Return whether a path is not a URI."""
    return "://" not in path


def read_tag(folder: str, path_manager: Any = None) -> str:
    """Return the file name in a folder's ``last_checkpoint``; empty if there is none or it is not a file name.

    Raises:
        OSError: the file cannot be read.
    """
    tag = os.path.join(folder, "last_checkpoint")
    try:
        if is_local(tag) and not os.path.isfile(tag):  # reading a pipe would wait
            return ""
        with path_manager.open(tag, "r") if path_manager else open(tag) as file:
            name = str(file.read(_MAX_NAME).strip())
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
    return name if name and os.path.basename(name) == name and name.isprintable() else ""


class CheckpointFolder:
    """Writes and removes files of a local folder or a URI.

    Args:
        path: the folder; it is created at the first write.
        path_manager: opens URIs.
    """

    def __init__(self, path: str, path_manager: Any) -> None:
        self.path = path
        self._path_manager = path_manager
        self._existed = bool(path) and is_local(path) and os.path.isdir(path)
        self._cleaned = False

    def write(self, path: str, write: Callable[[IO[bytes]], Any]) -> None:
        """Have ``write(file)`` write a local file, which then replaces ``path``.

        Behind a URI, the file is as atomic as the URI's handler makes it.

        Raises:
            OSError: the file cannot be written. An earlier file of that name is unchanged.
        """
        if is_local(path):
            claim(path)
            self.prepare()
            with displaced(path) if is_checkpoint_folder(path) else nullcontext():
                replace_file(path, write)
            return
        with tempfile.NamedTemporaryFile() as file:
            write(file)
            file.seek(0)
            try:
                with suppress(NotImplementedError):  # storage without folders
                    self._path_manager.mkdirs(self.path)
                with self._path_manager.open(path, "wb") as target:
                    shutil.copyfileobj(file, target, 1 << 24)
            except OSError:
                raise
            except Exception as error:  # handlers have their own error types
                raise OSError(f"{type(error).__name__}: {error}") from error

    def prepare(self) -> None:
        """Create the folder. Before the first save, remove temporary files of killed processes.

        Raises:
            OSError: the folder cannot be created, or it existed before and is gone. It is not created again then: a
                disk may be unmounted.
        """
        if self._existed:
            os.stat(self.path)
        else:
            os.makedirs(self.path, exist_ok=True)
        self._existed = True
        if not self._cleaned and (removed := remove_leftovers(self.path, alone=True)):
            logger.info("Removed temporary files of killed processes: %s", ", ".join(removed))
        self._cleaned = True

    def remove(self, path: str) -> None:
        """Remove a checkpoint that this run wrote. Errors are logged; missing files are ignored."""
        if not is_claimed(path) or (os.path.isdir(path) and not is_checkpoint_folder(path)):
            logger.warning("%s was not written by this run, and is not removed", path)
            return
        try:
            if os.path.isdir(path):  # a sharded checkpoint
                shutil.rmtree(path)
            elif self._path_manager.exists(path):
                self._path_manager.rm(path)
        except Exception as error:  # handlers have their own error types
            logger.warning("Cannot remove the old checkpoint %s: %s", path, error)


# ---------------------------------------------------------------------------- when and on which thread

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
        asynchronous: write on a thread. It is not a daemon: the program waits for it before it exits.
        on_error: "stop" raises an OSError as a CheckpointError, "continue" logs it. Other errors are always raised.
    """

    def __init__(self, asynchronous: bool = False, on_error: OnError = "stop") -> None:
        check_on_error(on_error)
        self.asynchronous = asynchronous
        self.on_error = on_error
        self.pending: tuple[Future[None], str, Then | None] | None = None
        """The write whose result is not reported yet, its path and what to call then."""
        self._thread: ThreadPoolExecutor | None = None
        self._memory: dict[Any, torch.Tensor] = {}  # kept for the next copy
        self._copied: list[torch.cuda.Event] = []

    def keep(self, data: Any) -> Any:
        """Return plain data for the next write; if it is asynchronous, a copy in host memory.

        Tensors on a GPU are copied into pinned memory on the current stream. The host does not wait, and later steps
        on the stream change no weight before it is copied. A tensor that occurs twice is copied once.
        """
        if not self.asynchronous:
            return data
        earlier, self._memory = self._memory, {}
        copies: dict[Any, torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
                return tensor.to("cpu", copy=True)
            key = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()
            if key not in copies:
                place = len(copies), *key[2:], tensor.is_cuda
                room = earlier.pop(place, None)
                if room is None:
                    room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                self._memory[place] = copies[key] = room.copy_(tensor, non_blocking=tensor.is_cuda)
            return copies[key]

        data = tree_map_only(torch.Tensor, copy, data)
        for device in {device for device, *_ in copies if device.type == "cuda"}:
            self._copied.append(torch.cuda.current_stream(device).record_event())
        return data

    def write(self, path: str, write: Callable[[], Any], then: Then | None = None) -> None:
        """Wait for the previous write, call ``write()``, which writes ``path``, then call ``then``.

        Raises:
            CheckpointError: this write or the previous one failed; ``then`` was called.
        """
        self.wait()
        copied, self._copied = self._copied, []

        def write_twice() -> None:
            for event in copied:
                event.synchronize()
            try:
                write()
            except OSError as error:
                logger.warning("Retrying once: %s", CheckpointError.of(path, error))
                time.sleep(RETRY_AFTER)
                write()

        if self.asynchronous:
            self._thread = self._thread or ThreadPoolExecutor(1, "hookline-checkpoint")
            self.pending = self._thread.submit(write_twice), path, then
            return
        done: Future[None] = Future()
        self.pending = done, path, then
        try:
            write_twice()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)
        self.wait()

    def poll(self) -> None:
        """Report a write that has ended. Does not wait.

        Raises:
            CheckpointError: the write failed.
        """
        if self.pending is not None and self.pending[0].done():
            self.wait()

    def wait(self) -> None:
        """Wait for the pending write and report it.

        Raises:
            CheckpointError: the write failed.
        """
        if self.pending is None:
            return
        error = self.pending[0].exception()
        (_, path, then), self.pending = self.pending, None
        if error is not None and not isinstance(error, OSError):
            raise error
        failure = None if error is None else CheckpointError.of(path, error)
        if failure is not None and self.on_error == "continue":
            logger.error(
                "Training continues without this checkpoint; the next one is saved when it is due: %s", failure
            )
        if then is not None:
            then(failure)
        if failure is not None and self.on_error == "stop":
            raise failure from error

    def close(self) -> None:
        """Call :meth:`wait`, end the thread, and free the memory of copies."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None
            self._memory.clear()
