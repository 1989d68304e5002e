"""The file of a checkpoint: the zip archive that torch.save makes, with checksums that cover every byte of it.

torch.save can compute the archive's own checksums, one for each record, but in a way that takes longer than writing
the file. Here it is told not to; zlib computes them on another thread while the file is written, and they are put in
when it is. What they do not cover (headers, padding, the archive's directory) has a checksum in the archive's comment,
the seal. So the file is an ordinary one for torch.load, and for zip tools; nothing lies beside it.
"""

import os
import re
import struct
import threading
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from ...config import ConfigError
from .disk_writer import DiskWriter, Span
from .torch_files import first_line, printable

__all__ = ["verify_checkpoint", "write_checkpoint"]

_SEAL = b"hookline crc32 "
_SEAL_LENGTH = len(_SEAL) + 8  # and as many hexadecimal digits

_CHUNK = 1 << 20
_MAX_THREADS = 4


def write_checkpoint(file: IO[bytes], data: Any) -> None:
    """Write a checkpoint, and bring it to the disk.

    Args:
        file: an empty local file, opened for writing and reading.
        data: tensors and plain data, as :func:`~hookline.engine.checkpoint.state.to_plain` makes them.

    Raises:
        OSError: it cannot be written.
    """
    writer = DiskWriter(file)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(data, writer)  # type: ignore[arg-type]
        writer.finish()
    except BaseException:
        if writer.error is not None:  # torch fails on it once more, in words that say nothing of the cause
            raise writer.error from None
        raise
    finally:
        torch.serialization.set_crc32_options(before)
        writer.close()
    _seal(file, writer.checksums)


def verify_checkpoint(path: str) -> None:
    """Make sure that every byte of a local file is as it was written.

    Of an archive by torch.save alone the records are checked, the headers between them are not; and nothing of one
    that it was told to write without checksums.

    Raises:
        ConfigError: the file is damaged or no checkpoint; the message names it, and what is wrong.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"{path} {'is not a file' if os.path.exists(path) else 'does not exist'}")
    try:
        wrong = _wrong(path)
    except Exception as error:  # of any kind, as the bytes happen to be
        raise ConfigError(f"{path} is damaged, or is not a checkpoint ({first_line(error)})") from error
    if wrong:
        raise ConfigError(f"{path} is {wrong}")


@dataclass(frozen=True)
class _Record:
    """A file in the archive.

    Attributes:
        name: of it.
        span: its content.
        entry: where its entry in the archive's directory begins.
        crc: the checksum that stands there.
        has_descriptor: whether the checksum is behind the content, too.
    """

    name: str
    span: Span
    entry: int
    crc: int
    has_descriptor: bool


def _seal(file: IO[bytes], known: Mapping[Span, int]) -> None:
    """Put the checksums into a file by torch.save, and bring that to the disk.

    Args:
        file: opened for writing and reading.
        known: checksums of parts that need not be read again.
    """
    size = file.seek(0, os.SEEK_END)
    records = _records(file, size)
    spans = [record.span for record in records]
    read = [span for span in spans if span not in known]
    crcs = {**known, **dict(zip(read, _checksums(file.name, read), strict=True))}
    for record in records:
        crc = crcs[record.span]
        _write_at(file, record.entry + 16, struct.pack("<L", crc))
        if record.has_descriptor:
            _write_at(file, sum(record.span) + 4, struct.pack("<L", crc))
    # The archive ends with the length of its comment, so far 0, and the comment.
    _write_at(file, size - 2, struct.pack("<H", _SEAL_LENGTH) + _SEAL)
    _write_at(file, size + len(_SEAL), b"%08x" % _rest(file, spans, size + len(_SEAL)))
    file.flush()
    os.fsync(file.fileno())


def _wrong(path: str) -> str:
    """What is wrong with a file; empty if nothing is."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return "empty"
        if _read_at(file, 0, 4) != b"PK\x03\x04":
            return "not a checkpoint"
        if not zipfile.is_zipfile(file):  # the archive's directory is its end
            return "damaged: it is cut short"
        records = _records(file, size)
        if not any(record.name.endswith("/data.pkl") for record in records):
            return "not a checkpoint, but some other archive"
        spans = [record.span for record in records]
        tail = _read_at(file, max(size - _SEAL_LENGTH, 0), _SEAL_LENGTH)
        sealed = re.fullmatch(re.escape(_SEAL) + rb"([0-9a-f]{8})", tail)
        if sealed and int(sealed[1], 16) != _rest(file, spans, size - 8):
            return "damaged: the checksum of its structure is wrong"
        with zipfile.ZipFile(file) as archive:
            if not sealed and archive.comment:
                return "damaged: its seal is broken"
    if not sealed and not any(record.crc for record in records):
        return ""
    for record, crc in zip(records, _checksums(path, spans), strict=True):
        if crc != record.crc:
            return f"damaged: the checksum of {printable(record.name)} is wrong"
    return ""


def _records(file: IO[bytes], size: int) -> list[_Record]:
    """The files in an archive, in the order of its directory.

    Raises:
        zipfile.BadZipFile: it is none, or not as torch writes it.
    """
    with zipfile.ZipFile(file) as archive:
        infos, entry = archive.infolist(), archive.start_dir
    if sum(info.file_size for info in infos) > size:  # a small file could mean any amount of work
        raise zipfile.BadZipFile("its parts overlap")
    records = []
    for info in infos:
        header = struct.unpack("<4s22x2H", _read_at(file, info.header_offset, 30))
        start = info.header_offset + 30 + header[1] + header[2]
        if header[0] != b"PK\x03\x04" or info.compress_type or start + info.file_size > size:
            raise zipfile.BadZipFile(f"{info.filename} is not where it should be")
        span = (start, info.file_size)
        records.append(_Record(info.filename, span, entry, info.CRC, bool(info.flag_bits & 8)))
        entry += 46 + sum(struct.unpack("<3H", _read_at(file, entry + 28, 6)))
    return records


def _checksums(path: str, spans: list[Span]) -> list[int]:
    """The CRC32 of parts of a file, computed on several threads if there is much to read."""
    crcs = [0] * len(spans)
    waiting = iter(sorted(range(len(spans)), key=lambda index: -spans[index][1]))  # large ones first
    errors: list[Exception] = []

    def work() -> None:
        try:
            with open(path, "rb", buffering=0) as file:
                buffer = memoryview(bytearray(_CHUNK))
                for index in waiting:
                    crcs[index] = _checksum(file, *spans[index], buffer)
        except Exception as error:
            errors.append(error)

    more = min(_MAX_THREADS, os.cpu_count() or 1, sum(size for _, size in spans) // (4 * _CHUNK)) - 1
    threads = [threading.Thread(target=work, name="hookline-checksums") for _ in range(more)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return crcs


def _checksum(file: Any, start: int, size: int, buffer: memoryview) -> int:
    # Read, not mapped: where the disk fails, that is an error here, and would be the process's end there.
    file.seek(start)
    crc = 0
    while size:
        count = file.readinto(buffer[: min(size, len(buffer))])
        if not count:
            raise EOFError("it ends too early")
        crc = zlib.crc32(buffer[:count], crc)
        size -= count
    return crc


def _rest(file: IO[bytes], spans: list[Span], end: int) -> int:
    """The CRC32 of all that is not in ``spans``, up to ``end``."""
    file.flush()
    crc, position = 0, 0
    for start, size in [*sorted(spans), (end, 0)]:
        crc = zlib.crc32(_read_at(file, position, start - position), crc)
        position = start + size
    return crc


def _read_at(file: IO[bytes], position: int, size: int) -> bytes:
    file.seek(position)
    return file.read(size)


def _write_at(file: IO[bytes], position: int, content: bytes) -> None:
    file.seek(position)
    file.write(content)
