"""Files of checkpoints: verified when they are read, written whole or not at all, also while training continues."""

import argparse
import errno
import logging
import os
import pickle
import sys
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from iopath.common.file_io import PathHandler
from ranks import complete
from small_runs import Attack, Counter
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer, CheckpointError, files
from hookline.engine.checkpoint.files import load_torch_file, verify_checkpoint, write_checkpoint
from hookline.hooks import BestCheckpointer

both_ways = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(files, "RETRY_AFTER", 0.0)


STATE = {"model": {"weight": torch.arange(7.0), "empty": torch.empty(0)}, "iteration": 3}


@pytest.fixture
def path(tmp_path):
    with open(tmp_path / "model.pth", "wb+") as file:
        write_checkpoint(file, STATE)
    return tmp_path / "model.pth"


def test_a_flipped_bit_is_detected_or_changes_nothing_that_is_read(path):
    whole = path.read_bytes()
    detected = 0
    flipped = range(0, len(whole), 5)
    for index in flipped:
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
    assert detected > len(flipped) // 3


def test_truncated_and_other_files_are_refused(path):
    whole = path.read_bytes()
    truncated = [whole[:length] for length in range(0, len(whole), 61)]
    for content in (*truncated, b"", b"some text", pickle.dumps({"model": 1})):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"model\.pth is (corrupt|cut short)"):
            verify_checkpoint(str(path))
    for other in (path.parent, path.parent / "gone.pth"):
        with pytest.raises(ConfigError, match=other.name):
            verify_checkpoint(str(other))


ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)
ARRAYS = {
    "c": ARRAY,
    "fortran": np.asfortranarray(ARRAY),
    "view": ARRAY.T,
    "scalar": np.array(3),
    "big endian": ARRAY.astype(">f4"),
    "complex": ARRAY.astype(np.complex64),
}


@pytest.mark.parametrize(("mmap", "new"), [(False, True), (True, True), (True, False)])
def test_numpy_arrays_are_read_as_tensors_and_numbers_as_pythons(tmp_path, mmap, new):
    content = {"arrays": ARRAYS, "list": [(np.int64(3), ARRAY)], "lr": np.float64(2.5)}
    torch.save(content, tmp_path / "file.pth", _use_new_zipfile_serialization=new)
    got = load_torch_file(str(tmp_path / "file.pth"), mmap=mmap)
    assert (got["lr"], got["list"][0][0]) == (2.5, 3)
    assert (type(got["lr"]), type(got["list"][0][0])) == (float, int)
    for name, array in ARRAYS.items():
        native = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("=")).reshape(array.shape)
        assert got["arrays"][name].dtype == torch.from_numpy(native).dtype
        assert torch.equal(got["arrays"][name], torch.from_numpy(native)), name


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
    ],
)
def test_what_is_not_data_is_named(tmp_path, content, names):
    torch.save({"model": {}, "x": content}, tmp_path / "file.pth")
    assert names in refused(tmp_path / "file.pth")


def test_files_of_other_kinds_are_refused_with_the_reason(tmp_path):
    path = tmp_path / "file.pth"
    path.write_bytes(pickle.dumps({"model": {"a": ARRAY}, "__author__": "someone"}))
    assert "is a pickle" in refused(path)
    path.unlink()
    os.mkfifo(path)
    assert "is not a file" in refused(path)


class OnDisk(Checkpointer):
    """Writes nothing; fails ``failures`` times."""

    failures, error, calls = 0, OSError(errno.ENOSPC, "No space left"), 0

    def _write(self, *args, **kwargs):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error


def levels(log, level):
    return [record.getMessage() for record in log.records if record.levelno == level]


def save_and_wait(checkpointer, then=None):
    checkpointer.save("a", then=then)
    checkpointer.wait()


@both_ways
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_write_is_retried_once_and_then_stops_the_run_or_is_logged(log, asynchronous, on_error, tmp_path):
    checkpointer = OnDisk(nn.Linear(1, 1), str(tmp_path), asynchronous=asynchronous, on_error=on_error)
    reported, checkpointer.failures = [], 1
    save_and_wait(checkpointer, reported.append)
    warning = levels(log, logging.WARNING)[0]
    assert warning.startswith("Retrying once: cannot save")
    assert "a.pth: No space left" in warning
    checkpointer.failures, checkpointer.calls = 2, 0
    with pytest.raises(CheckpointError, match=r"a\.pth.*OUTPUT_DIR") if on_error == "stop" else nullcontext():
        save_and_wait(checkpointer, reported.append)
    assert len(levels(log, logging.ERROR)) == (on_error == "continue")
    save_and_wait(checkpointer, reported.append)  # the next save is a new one
    assert checkpointer.calls == 3
    assert [error and error.errno for error in reported] == [None, errno.ENOSPC, None]
    checkpointer.failures, checkpointer.calls, checkpointer.error = 9, 0, RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        save_and_wait(checkpointer)
    assert checkpointer.calls == 1


class Gated(Checkpointer):
    """Writes only once ``gate`` is open."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, asynchronous=True, **kwargs)
        self.gate = threading.Event()

    def _write(self, *args, **kwargs):
        self.gate.wait(20)
        super()._write(*args, **kwargs)


def net(value=0.0):
    model = nn.Linear(3, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def names(folder):
    return sorted(os.listdir(folder))


def resumed(folder, **kwargs):
    """Return the iteration and the weights' value from which a run in ``folder`` would resume."""
    model = net()
    extra = Checkpointer(model, str(folder), **kwargs).resume_or_load("")
    return extra.get("iteration"), model.weight[0, 0].item()


@pytest.fixture
def folder(tmp_path):
    """A folder with a checkpoint of iteration 1, whose weights are 1."""
    Checkpointer(net(1.0), str(tmp_path / "run")).save("model_1", iteration=1)
    return tmp_path / "run"


def test_an_asynchronous_save_holds_the_state_at_the_call(folder):
    model, counter = net(2.0), Counter([1])
    checkpointer = Gated(model, str(folder), counter=counter)
    checkpointer.save("model_2", iteration=2, outdated=[str(folder / "model_1.pth")])
    with torch.no_grad():
        model.weight.fill_(9.0)
    counter.value.append(9)
    checkpointer.poll()
    assert names(folder) == ["last_checkpoint", "model_1.pth"]
    assert resumed(folder) == (1, 1.0)
    checkpointer.gate.set()
    checkpointer.wait()
    assert names(folder) == ["last_checkpoint", "model_2.pth"]
    fresh = Counter()
    assert resumed(folder, counter=fresh) == (2, 2.0)
    assert fresh.value == [1]


EXITS = """
import sys, time, torch
from hookline.engine.checkpoint import Checkpointer

class Slow(Checkpointer):
    def _write(self, *args, **kwargs):
        time.sleep(0.5)
        super()._write(*args, **kwargs)

model = torch.nn.Linear(3, 3)
torch.nn.init.ones_(model.weight)
Slow(model, sys.argv[1], asynchronous=True).save("model_2", iteration=2)
"""


def test_a_program_waits_for_its_last_save_before_it_exits(tmp_path):
    (tmp_path / "exits.py").write_text(EXITS)
    complete([sys.executable, tmp_path / "exits.py", tmp_path], tmp_path)
    assert resumed(tmp_path) == (2, 1.0)


class Bucket(PathHandler):
    """URIs of files in a folder."""

    def __init__(self, folder):
        self.folder = folder

    def _get_supported_prefixes(self):
        return ["bucket://"]

    def _get_local_path(self, path, force=False, **kwargs):
        return str(self.folder / path.removeprefix("bucket://run/"))

    def _open(self, path, mode="r", buffering=-1, **kwargs):
        return open(self._get_local_path(path), mode)

    def _exists(self, path, **kwargs):
        return os.path.exists(self._get_local_path(path))


def in_bucket(folder, model, **kwargs):
    checkpointer = Checkpointer(model, "bucket://run", counter=Counter(), **kwargs)
    checkpointer.path_manager.register_handler(Bucket(folder))
    return checkpointer


@both_ways
def test_behind_a_uri_checkpoints_are_saved_kept_and_resumed(tmp_path, asynchronous, log):
    checkpointer = in_bucket(tmp_path, net(1.0), asynchronous=asynchronous)
    checkpointer.save("model_1", iteration=1)
    checkpointer.save("model_2", iteration=2, outdated=["bucket://run/model_1.pth"])
    checkpointer.wait()
    assert names(tmp_path) == ["last_checkpoint", "model_1.pth", "model_2.pth"]
    assert "bucket://run/model_1.pth is kept" in log.text
    model = net()
    fresh = in_bucket(tmp_path, model)
    assert fresh.resume_or_load("") == {"iteration": 2}
    assert model.weight[0, 0] == 1.0
    with pytest.raises(ConfigError, match="bucket://run"):
        BestCheckpointer(1, fresh, "accuracy")
