"""The files of checkpoints: written with checksums, retried once, and verified before they are read.

``torch.save`` stores a CRC32 of each record of its zip archive, which :func:`verify_checkpoint` compares.
"""

import logging
import math
import os
import re
import shutil
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any

import numpy as np
import torch
from fvcore.common.checkpoint import Checkpointer
from iopath.common.file_io import PathManager

from ...config.atomic import WriteError, displaced, is_checkpoint_folder, remove_path, replace_file
from ...config.errors import ConfigError, first_line, printable
from .state import copy_to_host

logger = logging.getLogger(__name__)

STATE_FILE = "state.pth"
"""The file of ``torch.save`` in the folder of a sharded checkpoint."""

# Start of torch.save's files before they were zip archives: a pickled number.
_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

# Longest content of last_checkpoint that is read.
_MAX_NAME = 4096


def write_checkpoint(file: IO[bytes], data: object) -> None:
    """Write tensors and plain data to an empty file, with ``torch.save``.

    Raises:
        OSError: the file cannot be written.
    """
    with disk_errors(file.name):
        torch.save(data, file)


@contextmanager
def disk_errors(path: str) -> Iterator[None]:
    """Raise the disk's error of a file, if there is one: after it, torch's archive writer raises another."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, path) from None


def verify_checkpoint(path: str) -> None:
    """Check that the content of a local file of ``torch.save`` is unchanged since it was written.

    Raises:
        ConfigError: the file is corrupt or not a checkpoint; the message names the file and the problem.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"{path} {'is not a file' if os.path.exists(path) else 'does not exist'}")
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            stored = all(record.compress_type == 0 and record.compress_size == record.file_size for record in records)
            if not stored or sum(record.file_size for record in records) > os.path.getsize(path):
                raise ValueError("its parts overlap or are compressed")  # could take any amount of work to read
            # There are none after torch.serialization.set_crc32_options(False).
            if any(record.CRC for record in records) and (wrong := archive.testzip()):
                raise ValueError(f"the checksum of {printable(wrong)} is wrong")
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{path} is cut short, or is not a checkpoint ({first_line(error)})") from error
    except Exception as error:  # corrupt bytes can cause any error
        raise ConfigError(f"{path} is corrupt: {first_line(error)}") from error


# ---------------------------------------------------------------------------- reading without running code


def load_torch_file(path: str, *, mmap: bool = False) -> Any:
    """Like ``torch.load(path, weights_only=True)`` on the CPU, but also reads NumPy arrays.

    Args:
        path: a local file.
        mmap: map the file into memory if the format allows it, so that only what is used is read.

    Returns:
        The content, with NumPy's numbers as Python's and its arrays as tensors.

    Raises:
        ConfigError: the file is corrupt, not by ``torch.save``, or holds objects that could run code.
    """
    if not os.path.isfile(path):  # reading a pipe would wait
        raise ConfigError(f"{path} {'is not a file' if os.path.exists(path) else 'does not exist'}")
    mmap = mmap and zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_STAND_INS):
            warnings.filterwarnings("ignore", "Detected pickle protocol|'torch.load' received a zip file")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or first_line(error)}") from error
    except Exception as error:  # corrupt bytes can cause any error
        raise ConfigError(f"{path} is {_explain(path, error)}") from error


def _explain(path: str, error: Exception) -> str:
    with open(path, "rb") as file:
        start = file.read(2 + len(_LEGACY))
    if start[:1] == b"\x80" and _LEGACY not in (start[2:], start[: len(_LEGACY)]):
        return (
            "a pickle. Reading one can run any code, so it is refused. If you trust its source, convert it once: load "
            "it with the pickle module, and torch.save() the dict"
        )
    if unknown := re.search(r"GLOBAL ([\w.]+) was not an allowed global|unsupported GLOBAL ([\w.]+)", str(error)):
        return (
            "corrupt, or is not a checkpoint that can be read without running code: it holds an object of "
            f"{unknown[1] or unknown[2]}. Save only tensors and plain data, such as model.state_dict()"
        )
    problem = first_line(error) if zipfile.is_zipfile(path) else "it is cut short, or not a file of torch.save()"
    return f"corrupt, or is not a checkpoint ({problem})"


# NumPy's own functions for unpickling trust what the file says about an array's memory. These replace them, and build
# only arrays of numbers, with exactly the bytes in the file.


class _Dtype:
    """Replaces ``numpy.dtype``."""

    def __init__(self, name: str, *_: object) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[biufc]\d{1,2}|\?", name):
            raise ValueError("an array that does not hold numbers")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])

    def decode(self, data: object, shape: tuple[int, ...]) -> np.ndarray:
        if (
            not isinstance(data, bytes)
            or min(shape, default=0) < 0
            or len(data) != math.prod(shape) * self.dtype.itemsize
        ):
            raise ValueError("an array whose length does not match its shape")
        # A copy in native byte order, which torch requires.
        return np.frombuffer(data, self.dtype).astype(self.dtype.newbyteorder("="))


class _Array(torch.Tensor):
    """Replaces ``numpy.ndarray``, and becomes a plain tensor when it gets its values."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, column_major, data = state
        flat = torch.from_numpy(dtype.decode(data, shape))
        self.data = flat.view(shape[::-1]).permute(*range(len(shape))[::-1]) if column_major else flat.view(shape)
        self.__class__ = torch.Tensor  # type: ignore[assignment]


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _scalar(dtype: _Dtype, data: object) -> object:
    return dtype.decode(data, ()).item()


def _no_bytes() -> bytes:
    return b""


_STAND_INS: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    (_Dtype, "numpy.dtype"),
    (_Array, "numpy.ndarray"),
    (_no_bytes, "builtins.bytes"),  # content of an empty array
    *((_reconstruct, f"{module}._reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
    *((_scalar, f"{module}.scalar") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
]


# ---------------------------------------------------------------------------- the folder


def read_tag(folder: str) -> str:
    """Return the file name in a folder's ``last_checkpoint``; empty if there is none that can be read."""
    tag, name = os.path.join(folder, "last_checkpoint"), ""
    with suppress(OSError):
        if os.path.isfile(tag):  # reading a pipe would wait
            with open(tag, encoding="utf-8", errors="replace") as file:
                name = file.read(_MAX_NAME).strip()
    return name if name.strip(".") and os.path.basename(name) == name and name.isprintable() else ""


def write_file(path: str, write: Callable[[IO[bytes]], object], path_manager: PathManager) -> None:
    """Have ``write(file)`` write a file, which then replaces ``path``, a file or folder. It is copied to a URI.

    Raises:
        OSError: the file cannot be written. An earlier local file of that name is unchanged.
    """
    if "://" not in path:
        with displaced(path) if os.path.isdir(path) else nullcontext():
            replace_file(path, write)
        return
    with tempfile.NamedTemporaryFile() as file:
        write(file)
        file.seek(0)
        try:
            with path_manager.open(path, "wb") as target:
                shutil.copyfileobj(file, target)
        except OSError:
            raise
        except Exception as error:  # handlers have their own error types
            raise OSError(f"{type(error).__name__}: {error}") from error


def remove_checkpoint(checkpointer: Checkpointer, path: str) -> None:
    """Remove a checkpoint that a run wrote into its folder. Errors are logged; missing files are ignored."""
    if "://" in path:
        logger.warning("%s is kept: checkpoints behind a URI are not removed", path)
        return
    if not os.path.lexists(path):
        return
    parent, name = os.path.split(os.path.abspath(path))
    of_a_run = parent == os.path.abspath(checkpointer.save_dir) and name.endswith(".pth")
    if not of_a_run or (os.path.isdir(path) and not is_checkpoint_folder(path)):
        logger.warning("%s was not written by this run, and is not removed", path)
        return
    try:
        remove_path(path)
    except OSError as error:
        logger.warning("Cannot remove the old checkpoint %s: %s", path, error)


# ---------------------------------------------------------------------------- writes that fail

RETRY_AFTER = 1.0
"""Seconds before a failed write is retried."""


class CheckpointError(WriteError):
    """A checkpoint could not be written. The message has the path, the cause and what to do. Earlier files remain."""

    verb = "save"


def start_write(
    path: str, write: Callable[[Any], object], state: object, asynchronous: bool
) -> "Future[CheckpointError | None]":
    """Start a write, which is retried once after an OSError.

    Args:
        path: the file, for messages.
        write: called with the state.
        state: plain data and tensors.
        asynchronous: copy the state in memory, and write the copy on a thread. The program waits for the thread before
            it exits.

    Returns:
        The result of the write: None, or the error of the second try. Without ``asynchronous`` it is there already.
    """
    if not asynchronous:
        done: Future[CheckpointError | None] = Future()
        done.set_result(_write_twice(path, write, state))
        return done
    state, copied = copy_to_host(state)
    thread = ThreadPoolExecutor(1, "hookline-checkpoint")
    try:
        return thread.submit(_write_twice, path, write, state, copied)
    finally:
        thread.shutdown(wait=False)  # the thread ends after the write


def _write_twice(
    path: str, write: Callable[[Any], object], state: object, copied: Iterable[torch.cuda.Event] = ()
) -> CheckpointError | None:
    for event in copied:
        event.synchronize()
    failure = None
    for retry in (True, False):
        try:
            write(state)
            return None
        except OSError as error:
            failure = CheckpointError.of(path, error)
            failure.__cause__ = error
        if retry:
            logger.warning("Retrying once: %s", failure)
            time.sleep(RETRY_AFTER)
    return failure
