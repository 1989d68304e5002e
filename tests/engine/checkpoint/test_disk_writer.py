import os
import threading
import zlib

import pytest

from hookline.engine.checkpoint import disk_writer
from hookline.engine.checkpoint.disk_writer import DiskWriter

PIECES = [os.urandom(size) for size in (10, 5_000, 3, 100_000, 4_096, 70_000)]


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    monkeypatch.setattr(disk_writer, "_LARGE", 1 << 12)
    monkeypatch.setattr(disk_writer, "_PIECE", 1 << 14)
    monkeypatch.setattr(disk_writer, "_STEP", 1 << 15)
    monkeypatch.setattr(disk_writer, "_PAGE", 1 << 12)


def test_everything_arrives_with_the_checksums_of_large_writes(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        writer = DiskWriter(file)
        for piece in PIECES:
            assert writer.write(piece) == len(piece)
        writer.finish()
        assert (tmp_path / "file").read_bytes() == b"".join(PIECES)
    expected, position = {}, 0
    for piece in PIECES:
        if len(piece) >= 1 << 12:
            expected[position, len(piece)] = zlib.crc32(piece)
        position += len(piece)
    assert writer.checksums == expected


def test_no_thread_is_left(tmp_path):
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


def test_an_error_on_the_way_to_the_disk_is_raised_at_the_end(tmp_path, monkeypatch):
    def broken(descriptor):
        raise OSError(5, "Input/output error")

    def write(writer):
        for piece in PIECES:
            writer.write(piece)
        writer.finish()

    with open(tmp_path / "file", "wb") as file:
        monkeypatch.setattr(os, "fdatasync", broken)
        with pytest.raises(OSError, match="Input/output error"):  # the system tells it once only
            write(DiskWriter(file))
