import io
import logging
import os
import pickle
import time

import numpy as np
import pytest
import torch
from small_runs import Counter
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer, DetectionCheckpointer, files, unwrap_model


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(files, "RETRY_AFTER", 0.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def names(folder):
    return sorted(os.listdir(folder))


def age(path, seconds):
    """Set a file's time to ``seconds`` ago."""
    now = time.time()
    os.utime(path, (now - seconds, now - seconds))


# ---------------------------------------------------------------------------- saving and loading


def test_saved_state_is_loaded(folder):
    model, counter = net(), Counter(7)
    Checkpointer(model, str(folder), counter=counter).save("model_a", iteration=3)
    assert names(folder) == ["last_checkpoint", "model_a.pth"]

    other, fresh = net(1), Counter()
    extra = Checkpointer(other, str(folder), counter=fresh).resume_or_load("")
    assert equal(model, other)
    assert fresh.value == 7
    assert extra == {"iteration": 3}


def test_without_a_folder_nothing_is_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Checkpointer(net()).save("model")
    assert names(tmp_path) == []


def test_a_rank_that_does_not_write_writes_nothing(folder):
    Checkpointer(net(), str(folder), save_to_disk=False).save("model")
    assert not folder.exists()


def test_a_name_with_a_folder_is_an_error(folder):
    with pytest.raises(ValueError, match="'a/b'"):
        Checkpointer(net(), str(folder)).save("a/b")


def test_detectron2s_name_is_the_same_class():
    assert DetectionCheckpointer is Checkpointer


def test_a_checkpoint_can_be_saved_without_becoming_the_last(folder):
    checkpointer = Checkpointer(net(), str(folder))
    checkpointer.save("model_a")
    checkpointer.save("model_b", tag_last=False)
    assert (folder / "last_checkpoint").read_text() == "model_a.pth"


def test_without_resume_only_weights_are_loaded(folder):
    model = net()
    Checkpointer(model, str(folder), counter=Counter(7)).save("model_a", iteration=3)
    other, fresh = net(1), Counter()
    path = str(folder / "model_a.pth")
    Checkpointer(other, str(folder / "new"), counter=fresh).resume_or_load(path, resume=False)
    assert equal(model, other)
    assert fresh.value == 0


def test_a_resume_without_a_checkpoint_starts_from_the_weights(folder):
    model, counter = net(), Counter(7)
    Checkpointer(model, str(folder), counter=counter).save("model_a")
    other, fresh = net(1), Counter()
    path = str(folder / "model_a.pth")
    Checkpointer(other, str(folder / "new"), counter=fresh).resume_or_load(path, resume=True)
    assert equal(model, other)
    assert fresh.value == 0


def test_a_plain_state_dict_of_any_kind_is_a_warm_start(folder, tmp_path):
    model, other = net(), net(1)
    path = tmp_path / "weights.pth"
    torch.save(model.state_dict(), path)
    Checkpointer(other, str(folder)).resume_or_load(str(path), resume=False)
    assert equal(model, other)


# ---------------------------------------------------------------------------- names of weights


class Compiled(nn.Module):
    """Like torch.compile(model): holds the model as _orig_mod."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        Compiled,
        lambda model: nn.DataParallel(Compiled(model)),
        lambda model: Compiled(nn.DataParallel(model)),
    ],
    ids=["parallel", "compiled", "parallel of compiled", "compiled of parallel"],
)
def test_wrapped_models_are_saved_and_loaded_with_plain_names(folder, wrap):
    model = net()
    assert unwrap_model(wrap(model)) is model
    Checkpointer(wrap(model), str(folder)).save("model")
    saved = torch.load(folder / "model.pth", weights_only=True)["model"]
    assert list(saved) == list(model.state_dict())

    plain, wrapped = net(1), net(2)
    Checkpointer(plain, str(folder)).resume_or_load("")
    Checkpointer(wrap(wrapped), str(folder)).resume_or_load("")
    assert equal(model, plain)
    assert equal(model, wrapped)


def test_a_partly_compiled_model_is_saved_and_loaded_with_plain_names(folder):
    def partly(seed):
        model = net(seed)
        model[0] = Compiled(model[0])
        return model

    model = partly(0)
    Checkpointer(model, str(folder)).save("model")
    saved = torch.load(folder / "model.pth", weights_only=True)["model"]
    assert list(saved) == list(net().state_dict())
    for other in (net(1), partly(1)):
        Checkpointer(other, str(folder)).resume_or_load("")
        assert torch.equal(next(other.parameters()), next(model.parameters()))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_weights_with_prefixes_of_other_tools_are_loaded(folder, tmp_path, prefix):
    model, other = net(), net(1)
    path = tmp_path / "weights.pth"
    torch.save({prefix + name: value for name, value in model.state_dict().items()}, path)
    Checkpointer(other, str(folder)).resume_or_load(str(path), resume=False)
    assert equal(model, other)


def test_a_part_of_a_model_may_be_called_module(folder):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    torch.manual_seed(0)
    model, other = Net(), Net()
    Checkpointer(model, str(folder)).save("model")
    Checkpointer(other, str(folder)).resume_or_load("")
    assert equal(model, other)


# ---------------------------------------------------------------------------- only data


def test_numpy_values_are_saved_as_data_that_loads_without_pickle(folder):
    counter = Counter(np.float64(0.5))
    Checkpointer(net(), str(folder), counter=counter).save("model", scores=np.arange(3), mean=np.float32(1.5))
    fresh = Counter()
    extra = Checkpointer(net(), str(folder), counter=fresh).resume_or_load("")
    assert fresh.value == 0.5
    assert extra["scores"].tolist() == [0, 1, 2]
    assert extra["mean"] == 1.5


def test_extra_state_of_a_module_is_saved_as_data_that_loads_without_pickle(folder):
    class Extra(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": np.int64(self.seen)}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model, other = Extra(2, 2), Extra(2, 2)
    model.seen = 5
    Checkpointer(model, str(folder)).save("model")
    Checkpointer(other, str(folder)).resume_or_load("")
    assert other.seen == 5


def test_loading_a_file_never_runs_code_in_it(folder, tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "attacked"),)

    path = tmp_path / "evil.pth"
    torch.save({"model": net().state_dict(), "extra": Attack()}, path)
    with pytest.raises(ConfigError, match=r"evil\.pth"):
        Checkpointer(net(), str(folder)).resume_or_load(str(path), resume=False)
    path.write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ConfigError, match=r"evil\.pth"):
        Checkpointer(net(), str(folder)).resume_or_load(str(path), resume=False)
    assert not (tmp_path / "attacked").exists()


# ---------------------------------------------------------------------------- failures


def test_a_state_that_cannot_be_saved_is_named_and_keeps_the_last_checkpoint(folder):
    model = net()
    counter = Counter(1)
    checkpointer = Checkpointer(model, str(folder), counter=counter)
    checkpointer.save("model_final")
    before = (folder / "model_final.pth").read_bytes()
    counter.value = [object()]
    with pytest.raises(TypeError, match=r"\['value'\]\[0\] is a object"):
        checkpointer.save("model_final")
    with pytest.raises(TypeError, match=r"\['value'\]\[0\] is a object"):
        checkpointer.save("model_next")
    assert names(folder) == ["last_checkpoint", "model_final.pth"]
    assert (folder / "model_final.pth").read_bytes() == before
    assert (folder / "last_checkpoint").read_text() == "model_final.pth"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_error_keeps_the_last_checkpoint(folder, monkeypatch, call):
    model = net()
    checkpointer = Checkpointer(model, str(folder))
    checkpointer.save("model_final", iteration=1)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        for name in ("model_final", "model_next"):
            with pytest.raises(OSError, match="No space left"):
                checkpointer.save(name, iteration=2)
    assert names(folder) == ["last_checkpoint", "model_final.pth"]
    assert Checkpointer(net(1), str(folder)).resume_or_load("") == {"iteration": 1}


def test_an_error_in_the_middle_of_a_file_keeps_the_last_checkpoint(folder, monkeypatch):
    checkpointer = Checkpointer(net(), str(folder))
    checkpointer.save("model_final", iteration=1)
    save = torch.save

    def half(data, file):
        whole = io.BytesIO()
        save(data, whole)
        file.write(whole.getvalue()[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(OSError, match="No space left"):
            checkpointer.save("model_final", iteration=2)
    assert names(folder) == ["last_checkpoint", "model_final.pth"]
    assert Checkpointer(net(1), str(folder)).resume_or_load("") == {"iteration": 1}


def damage(path, how):
    whole = path.read_bytes()
    if how == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "garbage":
        path.write_bytes(b"garbage" * 100)
    elif how == "text":
        path.write_bytes(b"torn")
    elif how == "missing":
        path.unlink()
    elif how == "bit":
        middle = whole.index(net()[0].weight.detach().numpy().tobytes()[:8])
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0x40]) + whole[middle + 1 :])


@pytest.mark.parametrize("how", ["cut", "empty", "garbage", "text", "missing", "bit"])
def test_a_resume_skips_a_damaged_checkpoint_with_a_warning(folder, log, how):
    checkpointer = Checkpointer(net(), str(folder))
    for iteration in (1, 2, 3):
        checkpointer.save(f"model_{iteration}", iteration=iteration)
        age(folder / f"model_{iteration}.pth", 100 - iteration)
    damage(folder / "model_3.pth", how)
    extra = Checkpointer(net(1), str(folder)).resume_or_load("")
    assert extra == {"iteration": 2}
    warnings = [r.getMessage() for r in log.records if r.levelno >= logging.WARNING]
    assert any("model_3.pth" in message for message in warnings)


@pytest.mark.parametrize("run", ["run", "digits_best"])
def test_a_resume_falls_back_to_an_older_checkpoint_and_never_to_the_best(tmp_path, run):
    folder = tmp_path / run
    checkpointer = Checkpointer(net(), str(folder))
    checkpointer.save("model_1", iteration=1)
    checkpointer.save("model_2", iteration=2)
    checkpointer.save("model_best", tag_last=False, iteration=1000)
    age(folder / "model_1.pth", 100)
    damage(folder / "model_2.pth", "cut")
    assert Checkpointer(net(1), str(folder)).resume_or_load("") == {"iteration": 1}


def test_a_resume_never_loads_a_plain_state_dict(folder):
    checkpointer = Checkpointer(net(), str(folder), counter=Counter(1))
    checkpointer.save("model_1", iteration=1)
    age(folder / "model_1.pth", 100)
    checkpointer.save("model_2", iteration=2)
    damage(folder / "model_2.pth", "cut")
    torch.save(net(5).state_dict(), folder / "pretrained.pth")
    assert Checkpointer(net(1), str(folder), counter=Counter()).resume_or_load("") == {"iteration": 1}


def test_a_resume_with_only_damaged_checkpoints_is_an_error(folder):
    checkpointer = Checkpointer(net(), str(folder))
    checkpointer.save("model_1")
    damage(folder / "model_1.pth", "cut")
    with pytest.raises(ConfigError, match="there is no undamaged checkpoint"):
        Checkpointer(net(1), str(folder)).resume_or_load("")


def test_a_missing_file_is_an_error_that_names_it(folder):
    with pytest.raises(ConfigError, match=r"nowhere\.pth"):
        Checkpointer(net(), str(folder)).resume_or_load("nowhere.pth", resume=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [([1, 2], "holds a list"), ({"weights": {}}, "has no 'model', only weights"), ({}, "has no 'model'")],
)
def test_a_file_that_is_not_a_checkpoint_is_an_error_with_the_reason(folder, tmp_path, content, message):
    path = tmp_path / "other.pth"
    torch.save(content, path)
    with pytest.raises(ConfigError, match=rf"other\.pth is not a checkpoint: it {message}"):
        Checkpointer(net(), str(folder)).resume_or_load(str(path), resume=False)


# ---------------------------------------------------------------------------- malicious files


@pytest.mark.parametrize("name", ["last_checkpoint", "model_b.pth"])
def test_a_pipe_in_place_of_a_checkpoint_is_skipped_without_waiting(folder, name):
    model = net()
    checkpointer = Checkpointer(model, str(folder), counter=Counter(5))
    checkpointer.save("model_a")
    if name == "last_checkpoint":
        os.remove(folder / name)
    else:
        (folder / "last_checkpoint").write_text(name)
    os.mkfifo(folder / name)
    counter = Counter()
    Checkpointer(net(1), str(folder), counter=counter).resume_or_load("")
    assert counter.value == 5


@pytest.mark.parametrize("junk", [7, "text", [1], {}, {"value": 1, "iteration": -5}])
def test_a_state_that_cannot_be_loaded_is_an_error_that_names_it(folder, junk):
    torch.save({"model": net().state_dict(), "trainer": junk}, folder.with_suffix(".pth"))
    with pytest.raises(ConfigError, match=r"run\.pth.*trainer|run\.pth: its iteration is -5"):
        Checkpointer(net(1), trainer=Counter()).load(str(folder.with_suffix(".pth")))


def flip_a_bit(path, of):
    """Flip a bit of a tensor in a file. Torch itself does not detect this in mapped files."""
    content = bytearray(path.read_bytes())
    content[content.index(of.numpy().tobytes()) + 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("checkpointables", [None, []])
@pytest.mark.parametrize("ours", [True, False])
def test_every_load_verifies_and_a_damaged_file_does_not_change_the_model(folder, ours, checkpointables):
    model = net()
    Checkpointer(model, str(folder)).save("model")
    if not ours:
        torch.save(model.state_dict(), folder / "model.pth")
    flip_a_bit(folder / "model.pth", model[0].weight.detach())
    other = net(1)
    with pytest.raises(ConfigError, match=r"model\.pth is damaged: the checksum of"):
        Checkpointer(other).load(str(folder / "model.pth"), checkpointables)
    assert equal(other, net(1))


def test_a_file_written_without_checksums_is_loaded(folder):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(net().state_dict(), folder.with_suffix(".pth"))
    finally:
        torch.serialization.set_crc32_options(before)
    model = net(1)
    Checkpointer(model).load(str(folder.with_suffix(".pth")))
    assert equal(model, net())
