"""The files of checkpoints: written atomically, verified before they are read, removed only if they are the run's.

``torch.save`` stores a CRC32 of each record of its zip archive, which :func:`verify_checkpoint` compares.
"""

import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import IO, Any

import torch

from ...config.errors import ConfigError, first_line, printable
from ...config.files.atomic import displaced, is_checkpoint_folder, remove_leftovers, replace_file
from ...config.files.run_folder import claim, is_claimed

__all__ = ["CheckpointFolder", "is_local", "read_tag", "verify_checkpoint", "write_checkpoint"]

logger = logging.getLogger(__name__)

# Longest content of last_checkpoint that is read.
_MAX_NAME = 4096


def write_checkpoint(file: IO[bytes], data: Any) -> None:
    """Write tensors and plain data to an empty file, with ``torch.save``.

    Raises:
        OSError: the file cannot be written.
    """
    writer = _Writer(file)
    try:
        torch.save(data, writer)  # type: ignore[arg-type]
    except BaseException:
        if writer.error is not None:  # torch raises another error, which does not name the cause
            raise writer.error from None
        raise


class _Writer:
    """A file object for ``torch.save``, which remembers the first error and writes nothing after it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        if self.error is not None:  # torch writes the archive's end even after an error
            raise self.error
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


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
