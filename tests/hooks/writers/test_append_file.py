import os

import pytest

from hookline.config import ConfigError
from hookline.hooks import CSVWriter, JSONWriter
from hookline.hooks.writers.append_file import AppendFile, back_up


def short_writes(monkeypatch, sizes):
    """Limit the bytes that each call of os.write takes; after the last size it fails with ENOSPC."""
    write, sizes = os.write, iter(sizes)

    def limited(descriptor, data):
        size = next(sizes, None)
        if size is None:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:size])

    monkeypatch.setattr(os, "write", limited)


def test_short_writes_are_continued(tmp_path, monkeypatch):
    file = AppendFile(str(tmp_path / "f"))
    short_writes(monkeypatch, [2, 1, 3])
    file.write(b"abcdef")
    assert (tmp_path / "f").read_bytes() == b"abcdef"


def test_a_failed_write_leaves_the_file_unchanged(tmp_path, monkeypatch):
    file = AppendFile(str(tmp_path / "f"))
    file.write(b"first\n")
    with monkeypatch.context() as patch:
        short_writes(patch, [3])
        with pytest.raises(OSError, match="No space"):
            file.write(b"second\n")
    assert (tmp_path / "f").read_bytes() == b"first\n"
    file.write("third\n")
    assert (tmp_path / "f").read_bytes() == b"first\nthird\n"


def test_a_partial_write_that_could_not_be_removed_is_removed_by_the_next_write(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("writer", [JSONWriter, CSVWriter])
def test_a_fifo_or_a_folder_is_refused(tmp_path, writer):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo is a FIFO"):
        writer(str(tmp_path / "fifo"))
    with pytest.raises(ConfigError, match="is a folder"):
        writer(str(tmp_path))


def test_earlier_backups_are_kept(tmp_path):
    path = tmp_path / "metrics.json"
    for number in range(3):
        path.write_text(str(number))
        back_up(str(path))
    assert not path.exists()
    kept = [tmp_path / f"metrics.json.{ending}" for ending in ("old", "old2", "old3")]
    assert [file.read_text() for file in kept] == ["0", "1", "2"]
