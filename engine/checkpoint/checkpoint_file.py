"""The file of a checkpoint: a file of ``torch.save`` with a checksum of every byte in the zip archive's comment.

The checksum is a CRC32, computed while the file is written. It does not depend on how torch lays out its archive.
Torch's own CRC32s are switched off (the zip records hold 0). ``torch.load`` ignores them; zip tools can list and
extract the file, but report wrong checksums.

The comment is the archive's end, so the file stays an ordinary zip archive: the last two bytes that torch wrote, the
comment's length of 0, become the new length, and the comment follows.
"""

import os
import re
import struct
import zipfile
import zlib
from typing import IO, Any

import torch

from ...config.errors import ConfigError, first_line, printable

__all__ = ["verify_checkpoint", "write_checkpoint"]

_COMMENT = b"hookline checksum %08x"
_LENGTH = struct.pack("<H", len(_COMMENT % 0))
_END = re.compile(re.escape(_LENGTH) + rb"hookline checksum ([0-9a-f]{8})")
_END_LENGTH = len(_LENGTH + _COMMENT % 0)
_CHUNK = 1 << 20


def write_checkpoint(file: IO[bytes], data: Any) -> None:
    """Write a checkpoint and flush it to disk.

    Args:
        file: an empty local file, opened for writing.
        data: tensors and plain data, as :func:`~hookline.engine.checkpoint.state.to_plain` returns them.

    Raises:
        OSError: the file cannot be written.
    """
    writer = _Writer(file)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(data, writer)  # type: ignore[arg-type]
    except BaseException:
        if writer.error is not None:  # torch raises another error, which does not name the cause
            raise writer.error from None
        raise
    finally:
        torch.serialization.set_crc32_options(before)
    file.seek(-2, os.SEEK_END)
    file.write(_LENGTH + _COMMENT % writer.crc)
    file.flush()
    os.fsync(file.fileno())


class _Writer:
    """A file object for ``torch.save``.

    Attributes:
        crc: the CRC32 of what was written.
        error: the first error; nothing is written after it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.crc = 0
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        if self.error is not None:  # torch writes the archive's end even after an error
            raise self.error
        view = memoryview(content).cast("B")
        self.crc = zlib.crc32(view, self.crc)
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing: the whole file is flushed at its end."""


def verify_checkpoint(path: str) -> None:
    """Check that a local file is unchanged since it was written.

    In files of :func:`write_checkpoint` every byte is checked. In others, by ``torch.save``, the CRC32 of each record
    is checked, if it has one.

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
            return _problem_in_archive(path, archive)


def _problem_in_archive(path: str, archive: zipfile.ZipFile) -> str:
    records, size = archive.infolist(), os.path.getsize(path)
    if not any(record.filename.endswith("/data.pkl") for record in records):
        return "not a checkpoint, but some other archive"
    if any(record.compress_type for record in records) or sum(record.file_size for record in records) > size:
        return "damaged: its parts overlap or are compressed"  # a small file could take any amount of work to read
    end = max(size - _END_LENGTH, 0)
    with open(path, "rb") as file:
        file.seek(end)
        tail = file.read()
    if match := _END.fullmatch(tail):
        return "" if _crc(path, end) == int(match[1], 16) else "damaged: the checksum of the file is wrong"
    if archive.comment:
        return "damaged: its checksum cannot be read"
    if not any(record.CRC for record in records):  # torch.save wrote no CRC32
        return ""
    wrong = archive.testzip()
    return f"damaged: the checksum of {printable(wrong)} is wrong" if wrong else ""


def _crc(path: str, end: int) -> int:
    """Return the CRC32 of what torch wrote: the file up to ``end``, and a comment length of 0."""
    crc = 0
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:  # read, not mapped: a disk error in mapped memory kills the process
        while end and (count := file.readinto(buffer[: min(end, _CHUNK)])):
            crc = zlib.crc32(buffer[:count], crc)
            end -= count
    return zlib.crc32(b"\0\0", crc)
