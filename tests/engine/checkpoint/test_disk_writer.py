import os
import struct
import threading
import zlib

import pytest

from hookline.engine.checkpoint import disk_writer
from hookline.engine.checkpoint.disk_writer import BlockChecksum, DiskWriter

PIECES = [os.urandom(size) for size in (10, 5_000, 3, 100_000, 4_096, 70_000)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(disk_writer, "_LARGE", 1 << 12)
    monkeypatch.setattr(disk_writer, "_PIECE", 1 << 14)
    monkeypatch.setattr(disk_writer, "_STEP", 1 << 15)
    monkeypatch.setattr(BlockChecksum, "BLOCK", 7_000)


def test_the_file_has_all_bytes_and_finish_returns_their_checksum(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        writer = DiskWriter(file)
        for piece in PIECES:
            assert writer.write(piece) == len(piece)
        checksum = writer.finish()
    content = (tmp_path / "file").read_bytes()
    assert content == b"".join(PIECES)
    blocks = [zlib.crc32(content[start : start + 7_000]) for start in range(0, len(content), 7_000)]
    assert checksum == zlib.crc32(struct.pack(f"<{len(blocks)}L", *blocks))


def test_finish_ends_the_threads(tmp_path):
    before = threading.active_count()
    with open(tmp_path / "file", "wb") as file:
        writer = DiskWriter(file)
        for piece in PIECES:
            writer.write(piece)
        assert threading.active_count() > before
        writer.finish()
    assert threading.active_count() == before


def test_nothing_is_written_after_an_error():
    with open("/dev/full", "wb", buffering=0) as file:
        writer = DiskWriter(file)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                writer.write(PIECES[3])
        with pytest.raises(OSError, match="No space left"):
            writer.finish()


def test_a_failed_sync_is_raised_by_finish(tmp_path, monkeypatch):
    def broken(descriptor):
        raise OSError(5, "Input/output error")

    def write(writer):
        for piece in PIECES:
            writer.write(piece)
        writer.finish()

    with open(tmp_path / "file", "wb") as file:
        monkeypatch.setattr(os, "fdatasync", broken)
        with pytest.raises(OSError, match="Input/output error"):  # the system reports it only once
            write(DiskWriter(file))
