import os
import zlib

import pytest

from hookline.config import ConfigError
from hookline.hooks import CSVWriter, JSONWriter
from hookline.hooks.writers.append_file import AppendFile, keep_aside


def short_writes(monkeypatch, sizes):
    """Have os.write take so many bytes of each call, and fail with ENOSPC when there are no sizes left."""
    write, sizes = os.write, iter(sizes)

    def limited(descriptor, data):
        size = next(sizes, None)
        if size is None:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:size])

    monkeypatch.setattr(os, "write", limited)


def test_a_piece_is_written_whole_however_little_the_system_takes_at_once(tmp_path, monkeypatch):
    file = AppendFile(str(tmp_path / "f"))
    short_writes(monkeypatch, [2, 1, 3])
    file.write(b"abcdef")
    assert (tmp_path / "f").read_bytes() == b"abcdef"


def test_a_piece_that_fails_leaves_nothing(tmp_path, monkeypatch):
    file = AppendFile(str(tmp_path / "f"), checksum=True)
    file.write(b"first\n")
    with monkeypatch.context() as patch:
        short_writes(patch, [3])
        with pytest.raises(OSError, match="No space"):
            file.write(b"second\n")
    assert (tmp_path / "f").read_bytes() == b"first\n"
    file.write("third\n")
    assert (tmp_path / "f").read_bytes() == b"first\nthird\n"
    assert file.content() == (12, zlib.crc32(b"first\nthird\n"))


def test_a_torn_piece_that_could_not_be_removed_at_once_is_removed_by_the_next(tmp_path, monkeypatch):
    file = AppendFile(str(tmp_path / "f"))
    file.write(b"first\n")
    with monkeypatch.context() as patch:
        short_writes(patch, [3])
        patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="No space"):
            file.write(b"second\n")
    assert (tmp_path / "f").read_bytes() == b"first\nsec"
    file.write(b"third\n")
    assert (tmp_path / "f").read_bytes() == b"first\nthird\n"


def test_the_checksum_covers_what_was_there_before(tmp_path):
    (tmp_path / "f").write_bytes(b"before\n")
    file = AppendFile(str(tmp_path / "f"), checksum=True)
    file.write(b"after\n")
    content = (13, zlib.crc32(b"before\nafter\n"))
    assert file.content() == content
    file.close()
    assert file.content() == content


@pytest.mark.parametrize("writer", [JSONWriter, CSVWriter])
def test_a_fifo_or_a_folder_is_refused(tmp_path, writer):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo is a FIFO"):
        writer(str(tmp_path / "fifo"))
    with pytest.raises(ConfigError, match="is a folder"):
        writer(str(tmp_path))


def test_what_was_kept_aside_before_is_kept(tmp_path):
    path = tmp_path / "metrics.json"
    for number in range(3):
        path.write_text(str(number))
        keep_aside(str(path))
    assert not path.exists()
    kept = [tmp_path / f"metrics.json.{ending}" for ending in ("old", "old2", "old3")]
    assert [file.read_text() for file in kept] == ["0", "1", "2"]
