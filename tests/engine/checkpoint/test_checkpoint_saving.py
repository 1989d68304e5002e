"""Saving when disks, processes and folders fail, behind URIs, and while training continues."""

import errno
import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from forker import forker
from iopath.common.file_io import PathHandler
from small_runs import Counter
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer, CheckpointError, files


class Gated(Checkpointer):
    """Writes only once ``gate`` is open."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()

    def _write(self, path, write):
        assert self.gate.wait(20)
        super()._write(path, write)


def start_saver(function, *arguments):
    """Start a process that calls a function of ``savers.py``."""
    script = Path(__file__).parent / "savers.py"
    return forker.start([script, function, json.dumps(arguments)], script.parent, os.environ)


def net(value=0.0, size=3):
    model = nn.Linear(size, size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def killed_while_writing(path):
    """Create the temporary file of a killed process."""
    code = "import os, sys; from hookline.config.files.atomic import replace_file\n"
    code += "replace_file(sys.argv[1], lambda file: os._exit(9))"
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == 9


def names(folder):
    return sorted(os.listdir(folder))


def messages(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def save_and_wait(checkpointer, name, **kwargs):
    checkpointer.save(name, **kwargs)
    checkpointer.wait()


def resumed(folder, **kwargs):
    """Return the iteration and the weights' value from which a run in ``folder`` would resume."""
    model = net()
    extra = Checkpointer(model, str(folder), **kwargs).resume_or_load("")
    return extra.get("iteration"), model.weight[0, 0].item()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(files, "RETRY_AFTER", 0.0)


# ---------------------------------------------------------------------------- order


@pytest.mark.parametrize("asynchronous", [False, True])
def test_outdated_files_are_removed_and_then_is_called_after_last_checkpoint_is_updated(folder, asynchronous):
    checkpointer = Checkpointer(net(), str(folder), asynchronous=asynchronous)
    checkpointer.save("model_1", iteration=1)
    seen = []

    def then(error):
        seen.append((error, names(folder), (folder / "last_checkpoint").read_text(), threading.current_thread()))

    checkpointer.save("model_2", outdated=[str(folder / "model_1.pth"), str(folder / "gone.pth")], then=then)
    checkpointer.wait()
    assert seen == [(None, ["last_checkpoint", "model_2.pth"], "model_2.pth", threading.main_thread())]


def test_then_is_called_at_once_if_nothing_is_saved(folder):
    reported = []
    Checkpointer(net(), str(folder), save_to_disk=False, asynchronous=True).save("model", then=reported.append)
    Checkpointer(net(), "", asynchronous=True).save("model", then=reported.append)
    assert reported == [None, None]
    assert not folder.exists()


def test_only_temporary_files_of_killed_runs_are_removed(folder, log):
    folder.mkdir()
    killed_while_writing(folder / "model_1.pth")
    mine = ["model_1.pth.tmp.1", "notes.txt.old.1", "thesis.old.3", "model_9.pth.old.7", "metrics.json"]
    for name in mine:
        (folder / name).write_text("mine")
    Checkpointer(net(), str(folder)).resume_or_load("")
    Checkpointer(net(), str(folder)).save("model_3")
    assert names(folder) == sorted([*mine, "last_checkpoint", "model_3.pth"])
    assert any("model_1.pth" in message for message in messages(log, logging.INFO))


# ---------------------------------------------------------------------------- disk errors


@pytest.fixture
def full(monkeypatch):
    """Make the next temporary files of a name fail with a full disk."""
    left, whole = {}, os.open

    def open_file(path, flags, *args, **kwargs):
        name = os.path.basename(str(path)).rpartition("-")[2]
        if "hookline-tmp" in str(path) and left.get(name, 0) > 0:
            left[name] -= 1
            return whole("/dev/full", os.O_RDWR)
        return whole(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_file)
    return left.__setitem__


@pytest.fixture
def small_files():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_above_the_size_limit_keeps_the_earlier_files(folder, small_files, asynchronous):
    checkpointer = Checkpointer(net(1.0), str(folder), asynchronous=asynchronous)
    checkpointer.save("model_1", iteration=1)
    checkpointer.wait()
    for name in ("model_1", "model_2"):
        with pytest.raises(CheckpointError, match=rf"cannot save .*{name}\.pth: File too large; raise the limit") as e:
            save_and_wait(checkpointer, name, iteration=2, more=torch.ones(100_000))
        assert e.value.errno == errno.EFBIG
    assert names(folder) == ["last_checkpoint", "model_1.pth"]
    assert resumed(folder) == (1, 1.0)


def test_a_full_disk_stops_the_run_and_keeps_the_earlier_files(folder, log, full):
    checkpointer = Checkpointer(net(1.0), str(folder))
    checkpointer.save("model_1", iteration=1)
    full("model_2.pth", 2)
    checkpointer.path_manager.rm = lambda path: pytest.fail("nothing may go")
    reported = []
    with pytest.raises(CheckpointError, match=r"model_2\.pth: No space left on device; make room there"):
        checkpointer.save("model_2", outdated=[str(folder / "model_1.pth")], then=reported.append)
    assert isinstance(reported[0], CheckpointError)
    assert names(folder) == ["last_checkpoint", "model_1.pth"]
    assert resumed(folder) == (1, 1.0)


def test_a_save_is_retried_when_the_disk_was_full_for_a_moment(folder, log, full):
    checkpointer = Checkpointer(net(1.0), str(folder))
    checkpointer.save("model_1", iteration=1)
    full("model_2.pth", 1)
    checkpointer.save("model_2", iteration=2)
    assert any("Retrying once" in message and "No space left" in message for message in messages(log))
    assert resumed(folder) == (2, 1.0)


@pytest.mark.parametrize("saved_before", [False, True])
def test_a_removed_folder_is_an_error_and_is_not_created_again(folder, saved_before):
    folder.mkdir(exist_ok=True)
    checkpointer = Checkpointer(net(1.0), str(folder))
    if saved_before:
        checkpointer.save("model_1")
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"model_2\.pth: No such file.*its folder was removed; create it again"):
        checkpointer.save("model_2", iteration=2)
    assert not folder.exists()
    folder.mkdir()
    checkpointer.save("model_3", iteration=3)
    assert resumed(folder) == (3, 1.0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_on_error_continue_skips_a_failed_checkpoint(folder, log, asynchronous):
    checkpointer = Checkpointer(net(1.0), str(folder), asynchronous=asynchronous, on_error="continue")
    checkpointer.save("model_1")
    checkpointer.wait()
    shutil.rmtree(folder)
    folder.write_text("a file where the folder was")
    reported = []
    checkpointer.save("model_2", then=reported.append)
    checkpointer.wait()
    assert isinstance(reported[0], CheckpointError)
    (message,) = messages(log, logging.ERROR)
    assert "Training continues" in message
    assert "model_2.pth" in message
    assert "its folder was removed" in message
    folder.unlink()
    folder.mkdir()
    checkpointer.save("model_3", iteration=3)
    checkpointer.wait()
    assert resumed(folder) == (3, 1.0)


def test_a_read_only_folder_is_an_error(folder, tmp_path):
    checkpointer = Checkpointer(net(1.0), str(folder))
    checkpointer.save("model_1", iteration=1)
    folder.chmod(0o555)
    user = os.geteuid()
    try:
        if user == 0:  # file modes do not restrict root
            os.seteuid(65534)
        with pytest.raises(CheckpointError, match=r"model_2\.pth: Permission denied; allow writing there"):
            checkpointer.save("model_2")
    finally:
        os.seteuid(user)
        folder.chmod(0o755)
    assert names(folder) == ["last_checkpoint", "model_1.pth"]
    assert resumed(folder) == (1, 1.0)


# ---------------------------------------------------------------------------- last_checkpoint


@pytest.mark.parametrize(
    "content", [None, b"", b"\n", b"\xff\xfe\x00garbage", b"model_9.pth", b"a/../b", b"\0", b"x" * 999]
)
def test_a_missing_or_wrong_last_checkpoint_falls_back_to_the_newest_file(folder, log, content):
    checkpointer = Checkpointer(net(1.0), str(folder), counter=Counter())
    for iteration in (1, 2):
        checkpointer.save(f"model_{iteration}", iteration=iteration)
        os.utime(folder / f"model_{iteration}.pth", (iteration, iteration))
    if content is None:
        (folder / "last_checkpoint").unlink()
    else:
        (folder / "last_checkpoint").write_bytes(content)
    assert resumed(folder, counter=Counter()) == (2, 1.0)
    assert any("Resuming from" in message and "model_2.pth" in message for message in messages(log))


def test_files_that_are_not_the_runs_are_not_resumed(folder, log):
    folder.mkdir()
    torch.save(net(5.0).state_dict(), folder / "pretrained.pth")
    (folder / "notes.pth").write_text("text")
    checkpointer = Checkpointer(net(1.0), str(folder), counter=Counter())
    assert checkpointer.resume_or_load("") == {}
    assert checkpointer.resumed_from == ""
    assert any("notes.pth" in message for message in messages(log))


def test_an_exception_checkpoint_is_resumed_if_last_checkpoint_names_it(folder):
    checkpointer = Checkpointer(net(1.0), str(folder))
    checkpointer.save("model_1", iteration=1)
    checkpointer.save("model_2", iteration=2)
    checkpointer.save("model_exception", tag_last=False, iteration=3)
    (folder / "model_2.pth").write_bytes(b"")
    assert resumed(folder) == (1, 1.0)
    (folder / "last_checkpoint").write_text("model_exception.pth")
    assert resumed(folder) == (3, 1.0)


# ---------------------------------------------------------------------------- content


def test_states_of_all_types_can_be_saved_and_loaded(folder):
    state = {
        "numpy": [np.float64(0.5), np.arange(3), np.array(["a"])],
        "containers": (defaultdict(list, a=[1]), deque([1]), frozenset({1})),
        "path": Path("a/b"),
        "generator": torch.Generator().manual_seed(3),
    }
    Checkpointer(net(), str(folder), counter=Counter(state)).save("model")
    fresh = Counter()
    Checkpointer(net(), str(folder), counter=fresh).resume_or_load("")
    assert fresh.value["numpy"][0] == 0.5
    assert fresh.value["containers"] == ({"a": [1]}, [1], {1})
    assert fresh.value["path"] == "a/b"
    assert torch.equal(fresh.value["generator"], torch.Generator().manual_seed(3).get_state())


def test_a_view_of_a_large_tensor_is_saved_without_the_rest(folder):
    Checkpointer(net(), str(folder), counter=Counter(torch.randn(1_000_000)[5:8])).save("model")
    assert (folder / "model.pth").stat().st_size < 20_000


# ---------------------------------------------------------------------------- URIs


class Memory(PathHandler):
    """Files in a dict, copied to a local folder for reading."""

    def __init__(self, cache):
        self.files, self.cache = {}, cache

    def _get_supported_prefixes(self):
        return ["memory://"]

    def _open(self, path, mode="r", buffering=-1, **kwargs):
        if mode == "wb":
            file, close = io.BytesIO(), io.BytesIO.close

            def keep():
                self.files[path] = file.getvalue()
                close(file)

            file.close = keep
            return _Closing(file, keep)
        if path not in self.files:
            raise FileNotFoundError(path)
        return io.BytesIO(self.files[path]) if "b" in mode else io.StringIO(self.files[path].decode())

    def _get_local_path(self, path, force=False, **kwargs):
        local = self.cache / path.removeprefix("memory://").replace("/", "_")
        local.write_bytes(self._open(path, "rb").read())
        return str(local)

    def _exists(self, path, **kwargs):
        return path in self.files

    _isfile = _exists

    def _ls(self, path, **kwargs):
        return [name.removeprefix(path + "/") for name in self.files if name.startswith(path + "/")]

    def _rm(self, path, **kwargs):
        del self.files[path]


class _Closing:
    def __init__(self, file, keep):
        self.write, self._keep = file.write, keep

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._keep()


@pytest.fixture
def memory(tmp_path):
    (tmp_path / "cache").mkdir()
    return Memory(tmp_path / "cache")


def remote(memory, model, **kwargs):
    checkpointer = Checkpointer(model, "memory://run", counter=Counter(), **kwargs)
    checkpointer.path_manager.register_handler(memory)
    return checkpointer


@pytest.mark.parametrize("asynchronous", [False, True])
def test_behind_a_uri_checkpoints_are_saved_pruned_and_resumed(memory, asynchronous):
    checkpointer = remote(memory, net(1.0), asynchronous=asynchronous)
    checkpointer.save("model_1", iteration=1)
    checkpointer.save("model_2", iteration=2, outdated=["memory://run/model_1.pth"])
    checkpointer.close()
    assert sorted(memory.files) == ["memory://run/last_checkpoint", "memory://run/model_2.pth"]
    model = net()
    again = remote(memory, model)
    assert again.has_checkpoint()
    assert again.get_checkpoint_file() == "memory://run/model_2.pth"
    assert again.get_all_checkpoint_files() == ["memory://run/model_2.pth"]
    assert again.resume_or_load("") == {"iteration": 2}
    assert model.weight[0, 0] == 1.0


def test_behind_a_uri_a_damaged_checkpoint_is_skipped(memory, log):
    checkpointer = remote(memory, net(1.0))
    for iteration in (8, 9, 10):
        checkpointer.save(f"model_{iteration}", iteration=iteration)
    whole = memory.files["memory://run/model_10.pth"]
    memory.files["memory://run/model_10.pth"] = whole[:-100]
    assert remote(memory, net()).resume_or_load("") == {"iteration": 9}
    assert any("memory://run/model_10.pth is damaged" in message for message in messages(log))


def test_errors_of_a_uris_handler_are_reported_as_disk_errors(memory, log):
    checkpointer = remote(memory, net(1.0), on_error="continue")
    memory._open = lambda *args, **kwargs: (_ for _ in ()).throw(KeyError("no such bucket"))
    checkpointer.save("model_1")
    (message,) = messages(log, logging.ERROR)
    assert "cannot save memory://run/model_1.pth: KeyError: 'no such bucket'" in message


# ---------------------------------------------------------------------------- asynchronous saves


def test_an_asynchronous_save_holds_the_state_at_the_call(folder):
    model, counter = net(1.0), Counter([1])
    checkpointer = Gated(model, str(folder), asynchronous=True, counter=counter)
    checkpointer.save("model_1", iteration=1)
    with torch.no_grad():
        model.weight.fill_(9.0)
    counter.value.append(9)
    checkpointer.gate.set()
    checkpointer.wait()
    fresh = Counter()
    assert resumed(folder, counter=fresh) == (1, 1.0)
    assert fresh.value == [1]


def test_an_asynchronous_save_holds_the_same_as_a_synchronous_one(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 20))
    model[2].weight = nn.Parameter(model[0].weight.detach().T)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    loaded = []
    for asynchronous in (False, True):
        folder = tmp_path / str(asynchronous)
        checkpointer = Checkpointer(model, str(folder), asynchronous=asynchronous, optimizer=optimizer)
        for _ in range(2):
            checkpointer.save("model")
        checkpointer.close()
        checkpointer.save("model")  # also after it was closed
        checkpointer.close()
        loaded.append(torch.load(folder / "model.pth", weights_only=True))
    torch.testing.assert_close(*loaded, rtol=0, atol=0)


def test_last_checkpoint_changes_only_when_an_asynchronous_write_is_complete(folder):
    checkpointer = Gated(net(1.0), str(folder), asynchronous=True)
    checkpointer.gate.set()
    checkpointer.save("model_1", iteration=1)
    checkpointer.wait()
    checkpointer.gate.clear()
    checkpointer.save("model_2", iteration=2, outdated=[str(folder / "model_1.pth")])
    checkpointer.poll()
    assert resumed(folder) == (1, 1.0)
    checkpointer.gate.set()
    checkpointer.wait()
    assert names(folder) == ["last_checkpoint", "model_2.pth"]


def test_loading_waits_for_a_pending_save(folder):
    model = net(1.0)
    checkpointer = Gated(model, str(folder), asynchronous=True)
    checkpointer.save("model_1", iteration=1)
    threading.Timer(0.1, checkpointer.gate.set).start()
    assert checkpointer.resume_or_load("") == {"iteration": 1}


def test_a_failed_asynchronous_save_is_raised_by_the_next_poll(folder):
    checkpointer = Checkpointer(net(1.0), str(folder), asynchronous=True)
    folder.write_text("a file where the folder is to be")
    checkpointer.save("model_1")
    checkpointer._saver.pending[0].exception(20)
    with pytest.raises(CheckpointError, match=r"model_1\.pth"):
        checkpointer.poll()
    checkpointer.poll()
    checkpointer.close()


def test_a_state_that_cannot_be_saved_raises_in_save(folder):
    checkpointer = Checkpointer(net(), str(folder), asynchronous=True, on_error="continue", counter=Counter([object()]))
    with pytest.raises(TypeError, match=r"counter\['value'\]\[0\] is a object"):
        checkpointer.save("model")
    checkpointer.close()


def test_a_program_waits_for_its_last_save_before_it_exits(folder):
    assert start_saver("save_and_end", str(folder)).wait(60) == 0
    assert resumed(folder) == (1, 1.0)


# ---------------------------------------------------------------------------- kills


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_killed_at_any_moment_leaves_an_undamaged_checkpoint(folder, asynchronous):
    draw, tag, done = random.Random(3), folder / "last_checkpoint", 0
    for _ in range(6):
        before = tag.read_text() if done else ""
        process = start_saver("save_for_ever", str(folder), asynchronous, done + 1)
        deadline = time.monotonic() + 60
        while not tag.exists() or tag.read_text() == before:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        model = net(size=600)
        extra = Checkpointer(model, str(folder), counter=Counter()).resume_or_load("")
        assert model.weight.unique().tolist() == [float(extra["iteration"])]
        assert extra["iteration"] > done
        done = extra["iteration"]
    Checkpointer(net(), str(folder)).save("model_final")
    assert not [name for name in names(folder) if name.startswith(".hookline-")]


def test_on_error_must_be_stop_or_continue(folder):
    with pytest.raises(ConfigError, match="on_error"):
        Checkpointer(net(), str(folder), on_error="ignore")
