"""Reading files of torch.save without running code, with NumPy arrays as tensors."""

import argparse
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint.torch_files import load_torch_file

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def loaded(tmp_path, content, mmap=False, **options):
    path = tmp_path / "file.pth"
    torch.save(content, path, **options)
    return load_torch_file(str(path), mmap=mmap)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize(
    "array",
    [
        ARRAY,
        np.asfortranarray(ARRAY),
        ARRAY.T,
        np.array(3),
        np.zeros((0, 4)),
        ARRAY.astype(">f4"),
        ARRAY.astype(np.float16),
        ARRAY.astype(np.int64),
        ARRAY.astype(np.uint8),
        ARRAY > 2,
        ARRAY.astype(np.complex64),
    ],
    ids=["c", "fortran", "view", "scalar", "empty", "big endian", "half", "int", "byte", "bool", "complex"],
)
def test_numpy_arrays_are_read_as_tensors(tmp_path, array, mmap):
    got = loaded(tmp_path, {"model": {"a": array}, "list": [(array,)]}, mmap)
    expected = torch.from_numpy(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("=")).reshape(array.shape))
    for tensor in (got["model"]["a"], got["list"][0][0]):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


def test_numpy_numbers_are_read_as_pythons(tmp_path):
    got = loaded(tmp_path, {"a": np.float64(2.5), "b": [np.int64(3)], "c": (np.float32(1), True)})
    assert got == {"a": 2.5, "b": [3], "c": (1.0, True)}
    assert type(got["a"]) is float
    assert type(got["b"][0]) is int


def test_a_file_of_torchs_old_format_is_read(tmp_path):
    got = loaded(tmp_path, {"a": ARRAY, "t": torch.ones(2)}, mmap=True, _use_new_zipfile_serialization=False)
    assert torch.equal(got["a"], torch.from_numpy(ARRAY))
    assert torch.equal(got["t"], torch.ones(2))


def test_a_state_dict_keeps_the_versions_of_its_modules(tmp_path):
    got = loaded(tmp_path, {"state_dict": nn.Sequential(nn.BatchNorm1d(2)).state_dict()})
    assert got["state_dict"]._metadata["0"]["version"] == 2


class Attack:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def refused(path):
    with pytest.raises(ConfigError) as info:
        load_torch_file(str(path))
    assert str(path) in str(info.value)
    return str(info.value)


@pytest.mark.parametrize("way", ["torch", "pickle", "torch's old format", "in an array"])
def test_objects_that_would_run_code_are_refused_and_not_run(tmp_path, way):
    path, attack = tmp_path / "evil.pth", Attack(str(tmp_path / "attacked"))
    if way == "pickle":
        path.write_bytes(pickle.dumps(attack))
    else:
        content = np.array([attack], dtype=object) if way == "in an array" else attack
        torch.save({"model": {}, "x": content}, path, _use_new_zipfile_serialization=way != "torch's old format")
    refused(path)
    assert os.listdir(tmp_path) == ["evil.pth"]


def test_a_pickle_is_refused_with_reason_and_advice(tmp_path):
    for name in ("detectron2.pkl", "model.pth"):
        (tmp_path / name).write_bytes(pickle.dumps({"model": {"a": ARRAY}, "__author__": "someone"}))
        message = refused(tmp_path / name)
        assert "is a pickle. Reading one can run any code" in message
        assert "torch.save()" in message


def test_an_object_in_a_file_is_named_by_its_class(tmp_path):
    torch.save({"model": {}, "args": argparse.Namespace(lr=1)}, tmp_path / "a.pth")
    assert "it holds an object of argparse.Namespace" in refused(tmp_path / "a.pth")
    torch.save(nn.Linear(2, 2), tmp_path / "b.pth")
    message = refused(tmp_path / "b.pth")
    assert "torch.nn.modules.linear.Linear" in message
    assert "model.state_dict()" in message


def test_arrays_that_do_not_hold_numbers_are_refused(tmp_path):
    for array in (np.array([{}, None], dtype=object), np.array(["text"]), np.zeros(2, dtype="M8[s]")):
        torch.save({"a": array}, tmp_path / "a.pth")
        assert "does not hold numbers" in refused(tmp_path / "a.pth")


def test_an_array_longer_than_its_content_is_refused(tmp_path):
    class Longer:
        def __reduce__(self):
            make, args, (version, _, dtype, order, data) = ARRAY.__reduce__()
            return make, args, (version, (1000, 1000), dtype, order, data)

    torch.save({"a": Longer()}, tmp_path / "a.pth")
    assert "length does not match its shape" in refused(tmp_path / "a.pth")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 and so on"])
def test_files_that_are_not_checkpoints_are_refused(tmp_path, content):
    (tmp_path / "file.pth").write_bytes(content)
    assert "is damaged, or is not a checkpoint" in refused(tmp_path / "file.pth")


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "it is empty"), (b"root:x:0:0:\n" * 9, "does not start like files of torch.save()"), (None, "cut short")],
)
def test_errors_say_what_is_wrong_with_a_file(tmp_path, content, message, mmap):
    path = tmp_path / "file.pth"
    torch.save({"a": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:600] if content is None else content)
    with pytest.raises(ConfigError) as error:
        load_torch_file(str(path), mmap=mmap)
    assert message in str(error.value)
    assert "Errno" not in str(error.value)


def test_a_torchscript_program_is_refused_with_advice(tmp_path):
    path = tmp_path / "program.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("program/constants.pkl", pickle.dumps(()))
        archive.writestr("program/data.pkl", pickle.dumps(()))
        archive.writestr("program/code/model.py", "")
        archive.writestr("program/version", "3")
    assert "TorchScript" in refused(path)


def nested(value, levels):
    for _ in range(levels):
        value = [value, value]
    return value


def test_data_referenced_twice_is_read_once(tmp_path):
    array = np.arange(3)
    content = loaded(tmp_path, {"a": [array], "b": nested([array], 3)})
    assert content["b"][0][1][0] is content["b"][1][0][1]
    assert torch.equal(content["b"][0][0][0][0], torch.arange(3))


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "model.pth")
    assert "is not a file" in refused(tmp_path / "model.pth")
