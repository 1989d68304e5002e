import io
import pickle
import struct
import zipfile

import pytest
import torch

from hookline.config import ConfigError
from hookline.engine.checkpoint.files import verify_checkpoint, write_checkpoint

STATE = {"model": {"weight": torch.arange(7.0), "empty": torch.empty(0)}, "iteration": 3}


def write(path, data=STATE):
    with open(path, "wb+") as file:
        write_checkpoint(file, data)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.pth"
    write(path)
    return path


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load_reads_the_file(path, mmap):
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    assert loaded["model"]["weight"].tolist() == STATE["model"]["weight"].tolist()
    assert loaded["iteration"] == 3


@pytest.mark.parametrize("size", [10, 3_000, 50_000])
def test_a_file_of_several_tensors_verifies_and_is_a_zip_archive(tmp_path, size):
    path = tmp_path / "model.pth"
    write(path, [torch.randn(size), torch.randn(5), torch.randn(size)])
    verify_checkpoint(str(path))
    assert [len(tensor) for tensor in torch.load(path, weights_only=True)] == [size, 5, size]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_any_flipped_bit_is_detected_or_changes_nothing_that_is_read(path):
    whole = path.read_bytes()
    detected = 0
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1 << index % 8]) + whole[index + 1 :])
        try:
            verify_checkpoint(str(path))
            loaded = torch.load(path, weights_only=True)
        except (ConfigError, RuntimeError):  # torch reads the archive's directory in another way than zipfile
            detected += 1
            continue
        assert loaded.keys() == STATE.keys()
        assert loaded["iteration"] == 3
        assert loaded["model"].keys() == STATE["model"].keys()
        assert all(torch.equal(loaded["model"][name], value) for name, value in STATE["model"].items())
    assert detected > len(whole) // 3


def test_a_flipped_bit_in_a_large_file_is_detected(tmp_path):
    path = tmp_path / "model.pth"
    write(path, [torch.randn(3_000_000), torch.randn(9)])
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 4
    path.write_bytes(whole)
    with pytest.raises(ConfigError, match=r"damaged: the checksum of .*data/0 is wrong"):
        verify_checkpoint(str(path))


def test_a_file_truncated_anywhere_is_detected(path):
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
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
def test_other_files_are_refused(path, content, message):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model\.pth {message}"):
        verify_checkpoint(str(path))


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        verify_checkpoint(str(tmp_path / "gone.pth"))
    with pytest.raises(ConfigError, match="is not a file"):
        verify_checkpoint(str(tmp_path))


def test_files_of_torch_save_are_verified_by_their_own_checksums(tmp_path):
    path = tmp_path / "other.pth"
    torch.save({"model": {"weight": torch.arange(50.0)}}, path)
    verify_checkpoint(str(path))
    whole = path.read_bytes()
    start = whole.index(torch.arange(50.0).numpy().tobytes())
    path.write_bytes(whole[: start + 9] + bytes([whole[start + 9] ^ 1]) + whole[start + 10 :])
    with pytest.raises(ConfigError, match=r"the checksum of .*data/0 is wrong"):
        verify_checkpoint(str(path))


def test_a_failed_write_raises_the_cause():
    with open("/dev/full", "wb+", buffering=0) as file, pytest.raises(OSError, match="No space left") as raised:
        write_checkpoint(file, STATE)
    assert raised.value.errno == 28


def test_overlapping_records_are_refused_before_they_are_read(tmp_path):
    torch.save({"model": {"weight": torch.zeros(1000)}}, tmp_path / "model.pth")
    content = (tmp_path / "model.pth").read_bytes()
    with zipfile.ZipFile(tmp_path / "model.pth") as archive:
        start = archive.start_dir
    end = content.index(b"PK\x05\x06")
    directory, count = content[start:end], 500  # the directory lists the same content many times
    directory = directory[: directory.index(b"PK\x06\x06")] if b"PK\x06\x06" in directory else directory
    entries = len(zipfile.ZipFile(tmp_path / "model.pth").infolist()) * count
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, entries, entries, len(directory) * count, start, 0)
    (tmp_path / "model.pth").write_bytes(content[:start] + directory * count + tail)
    with pytest.raises(ConfigError, match="its parts overlap"):
        verify_checkpoint(str(tmp_path / "model.pth"))
