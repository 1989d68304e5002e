"""Reading files of torch.save without running code in them, with NumPy arrays as tensors."""

import argparse
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint.files import load_torch_file

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)
ARRAYS = {
    "c": ARRAY,
    "fortran": np.asfortranarray(ARRAY),
    "view": ARRAY.T,
    "scalar": np.array(3),
    "empty": np.zeros((0, 4)),
    "big endian": ARRAY.astype(">f4"),
    "half": ARRAY.astype(np.float16),
    "bool": ARRAY > 2,
    "complex": ARRAY.astype(np.complex64),
}


def loaded(tmp_path, content, mmap=False, **options):
    torch.save(content, tmp_path / "file.pth", **options)
    return load_torch_file(str(tmp_path / "file.pth"), mmap=mmap)


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"mmap": True, "_use_new_zipfile_serialization": False}])
def test_numpy_arrays_are_read_as_tensors_and_numbers_as_pythons(tmp_path, options):
    got = loaded(tmp_path, {"arrays": ARRAYS, "list": [(np.int64(3), ARRAY)], "lr": np.float64(2.5)}, **options)
    assert (got["lr"], got["list"][0][0]) == (2.5, 3)
    assert (type(got["lr"]), type(got["list"][0][0])) == (float, int)
    for name, array in ARRAYS.items():
        native = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("=")).reshape(array.shape)
        assert got["arrays"][name].dtype == torch.from_numpy(native).dtype
        assert torch.equal(got["arrays"][name], torch.from_numpy(native)), name


def test_data_referenced_many_times_is_read_once(tmp_path):
    nested = [np.arange(3)]
    for _ in range(40):
        nested = [nested, nested]
    content = loaded(tmp_path, nested)
    assert content[0] is content[1]


class Attack:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


class Longer:
    """An array that claims more numbers than it has."""

    def __reduce__(self):
        make, args, (version, _, dtype, order, data) = ARRAY.__reduce__()
        return make, args, (version, (1000, 1000), dtype, order, data)


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


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"args": argparse.Namespace(lr=1)}, "argparse.Namespace"),
        (nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        (np.array([{}, None], dtype=object), "does not hold numbers"),
        (np.array(["text"]), "does not hold numbers"),
        (Longer(), "length"),
    ],
)
def test_what_is_not_data_is_named(tmp_path, content, names):
    torch.save({"model": {}, "x": content}, tmp_path / "file.pth")
    assert names in refused(tmp_path / "file.pth")


def test_files_of_other_kinds_are_refused_with_the_reason(tmp_path):
    path = tmp_path / "file.pth"
    torch.save({"a": torch.ones(100)}, path)
    for content in (b"", b"hello", b"PK\x03\x04 and so on", path.read_bytes()[:600]):
        path.write_bytes(content)
        assert "is damaged, or is not a checkpoint" in refused(path)
    path.write_bytes(pickle.dumps({"model": {"a": ARRAY}, "__author__": "someone"}))
    assert "is a pickle" in refused(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("constants.pkl", "data.pkl", "code/model.py", "version"):
            archive.writestr(f"program/{name}", pickle.dumps(()) if name.endswith("pkl") else "3")
    assert "TorchScript" in refused(path)
    path.unlink()
    os.mkfifo(path)
    assert "is not a file" in refused(path)
