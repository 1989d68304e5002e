import io
import pickle
import struct
import zipfile

import pytest
import torch

from hookline.config import ConfigError
from hookline.engine.checkpoint import disk_writer
from hookline.engine.checkpoint.checkpoint_file import verify_checkpoint, write_checkpoint

STATE = {"model": {"weight": torch.arange(7.0), "empty": torch.empty(0)}, "iteration": 3}


def write(path, data=STATE):
    with open(path, "wb+") as file:
        write_checkpoint(file, data)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.pth"
    write(path)
    return path


@pytest.fixture
def steps(monkeypatch):
    """Have kilobytes count as large."""
    monkeypatch.setattr(disk_writer, "_LARGE", 1 << 12)
    monkeypatch.setattr(disk_writer, "_PIECE", 1 << 14)
    monkeypatch.setattr(disk_writer, "_STEP", 1 << 15)
    monkeypatch.setattr(disk_writer, "_PAGE", 1 << 12)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_it_like_its_own(path, mmap):
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    assert loaded["model"]["weight"].tolist() == STATE["model"]["weight"].tolist()
    assert loaded["iteration"] == 3


@pytest.mark.parametrize("size", [10, 3_000, 50_000])
def test_zip_tools_find_its_checksums_right(tmp_path, steps, size):
    path = tmp_path / "model.pth"
    write(path, [torch.randn(size), torch.randn(5), torch.randn(size)])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        content = path.read_bytes()
        for info in archive.infolist():  # those behind the content, for tools that read from a stream
            name, extra = struct.unpack("<2H", content[info.header_offset + 26 : info.header_offset + 30])
            end = info.header_offset + 30 + name + extra + info.file_size
            if info.flag_bits & 8:
                assert content[end : end + 8] == b"PK\x07\x08" + struct.pack("<L", info.CRC)
    verify_checkpoint(str(path))


def test_torchs_own_checksums_are_on_again_afterwards(path):
    assert torch.serialization.get_crc32_options()


def test_any_flipped_bit_is_found(path):
    whole = path.read_bytes()
    for index in range(0, len(whole), 3):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1 << index % 8]) + whole[index + 1 :])
        with pytest.raises(ConfigError, match=r"model\.pth is (damaged|not a checkpoint)"):
            verify_checkpoint(str(path))


def test_a_flipped_bit_in_a_large_file_is_found(tmp_path, steps):
    path = tmp_path / "model.pth"
    write(path, [torch.randn(3_000_000), torch.randn(9)])
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 4
    path.write_bytes(whole)
    with pytest.raises(ConfigError, match=r"damaged: the checksum of .*/data/0 is wrong"):
        verify_checkpoint(str(path))


def test_a_file_cut_off_anywhere_is_found(path):
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"model\.pth is (damaged|empty|not a checkpoint)"):
            verify_checkpoint(str(path))


def archive_of(name):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, "text")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"some text", "is not a checkpoint"),
        (pickle.dumps({"model": 1}), "is not a checkpoint"),
        (archive_of("notes.txt"), "is not a checkpoint, but some other archive"),
    ],
    ids=["empty", "text", "pickle", "zip"],
)
def test_foreign_files_are_told_from_checkpoints(path, content, message):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model\.pth {message}"):
        verify_checkpoint(str(path))


def test_what_is_no_file_is_told(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        verify_checkpoint(str(tmp_path / "gone.pth"))
    with pytest.raises(ConfigError, match="is not a file"):
        verify_checkpoint(str(tmp_path))


def test_a_file_of_torch_save_is_checked_by_its_own_checksums(tmp_path):
    path = tmp_path / "other.pth"
    torch.save({"model": {"weight": torch.arange(50.0)}}, path)
    verify_checkpoint(str(path))
    whole = path.read_bytes()
    start = whole.index(torch.arange(50.0).numpy().tobytes())
    path.write_bytes(whole[: start + 9] + bytes([whole[start + 9] ^ 1]) + whole[start + 10 :])
    with pytest.raises(ConfigError, match=r"the checksum of .*data/0 is wrong"):
        verify_checkpoint(str(path))


def test_the_cause_of_a_failed_write_is_told():
    with open("/dev/full", "wb+", buffering=0) as file, pytest.raises(OSError, match="No space left") as raised:
        write_checkpoint(file, STATE)
    assert raised.value.errno == 28
    assert torch.serialization.get_crc32_options()


def test_parts_that_overlap_are_refused_before_they_are_read(tmp_path):
    torch.save({"model": {"weight": torch.zeros(1000)}}, tmp_path / "model.pth")
    content = (tmp_path / "model.pth").read_bytes()
    with zipfile.ZipFile(tmp_path / "model.pth") as archive:
        start = archive.start_dir
    end = content.index(b"PK\x05\x06")
    directory, count = content[start:end], 500  # the directory says that all is there so many times
    directory = directory[: directory.index(b"PK\x06\x06")] if b"PK\x06\x06" in directory else directory
    entries = len(zipfile.ZipFile(tmp_path / "model.pth").infolist()) * count
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, entries, entries, len(directory) * count, start, 0)
    (tmp_path / "model.pth").write_bytes(content[:start] + directory * count + tail)
    with pytest.raises(ConfigError, match="its parts overlap"):
        verify_checkpoint(str(tmp_path / "model.pth"))
