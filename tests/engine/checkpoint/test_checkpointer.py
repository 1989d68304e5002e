import os

import numpy as np
import pytest
import torch
from small_runs import Counter, same, seeded_net
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer, files
from hookline.engine.checkpoint.checkpointer import unwrap_model


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(files, "RETRY_AFTER", 0.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def names(folder):
    return sorted(os.listdir(folder))


def test_a_resume_loads_everything_and_a_new_run_the_weights_only(folder, tmp_path):
    model = seeded_net()
    checkpointer = Checkpointer(model, str(folder), counter=Counter(7))
    checkpointer.save("model_a", iteration=3, scores=np.arange(3))
    checkpointer.save("model_b", tag_last=False, iteration=4)
    assert names(folder) == ["last_checkpoint", "model_a.pth", "model_b.pth"]

    other, fresh = seeded_net(1), Counter()
    extra = Checkpointer(other, str(folder), counter=fresh).resume_or_load("")
    assert same(model, other)
    assert (fresh.value, extra["iteration"], extra["scores"].tolist()) == (7, 3, [0, 1, 2])

    plain = tmp_path / "weights.pth"
    torch.save(model.state_dict(), plain)
    for path, resume in ((folder / "model_a.pth", False), (folder / "model_a.pth", True), (plain, False)):
        other, fresh = seeded_net(1), Counter()
        Checkpointer(other, str(folder / "new"), counter=fresh).resume_or_load(str(path), resume=resume)
        assert same(model, other)
        assert fresh.value == 0


def test_nothing_is_saved_without_a_folder_or_by_a_rank_that_does_not_write(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    called = []
    Checkpointer(seeded_net()).save("model", then=called.append)
    Checkpointer(seeded_net(), str(folder), save_to_disk=False).save("model", then=called.append)
    assert names(tmp_path) == []
    assert called == [None, None]
    with pytest.raises(ValueError, match="'a/b'"):
        Checkpointer(seeded_net(), str(folder)).save("a/b")


class Compiled(nn.Module):
    """Like torch.compile(model): holds the model as _orig_mod."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model


def partly_compiled(model):
    model[0] = Compiled(model[0])
    return model


@pytest.mark.parametrize("wrap", [lambda model: nn.DataParallel(Compiled(model)), partly_compiled])
def test_wrapped_models_are_saved_and_loaded_with_plain_names(folder, wrap):
    model, plain, wrapped = seeded_net(), seeded_net(1), wrap(seeded_net(2))
    Checkpointer(wrap(seeded_net()), str(folder)).save("model")
    assert list(torch.load(folder / "model.pth", weights_only=True)["model"]) == list(model.state_dict())
    Checkpointer(plain, str(folder)).resume_or_load("")
    Checkpointer(wrapped, str(folder)).resume_or_load("")
    assert same(model, plain)
    assert all(map(torch.equal, unwrap_model(wrapped).parameters(), model.parameters()))


def test_a_state_that_cannot_be_saved_is_named_and_keeps_the_last_checkpoint(folder):
    counter = Counter(1)
    checkpointer = Checkpointer(seeded_net(), str(folder), counter=counter)
    checkpointer.save("model_final")
    before = (folder / "model_final.pth").read_bytes()
    counter.value = [object()]
    for name in ("model_final", "model_next"):
        with pytest.raises(TypeError, match=r"\['value'\]\[0\]"):
            checkpointer.save(name)
    assert names(folder) == ["last_checkpoint", "model_final.pth"]
    assert (folder / "model_final.pth").read_bytes() == before
    assert (folder / "last_checkpoint").read_text() == "model_final.pth"


def corrupt(path, how):
    whole = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "bit":
        middle = whole.index(seeded_net()[0].weight.detach().numpy().tobytes()[:8])
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0x40]) + whole[middle + 1 :])
    elif how == "pipe":
        os.mkfifo(path)


@pytest.mark.parametrize("how", ["cut", "missing", "bit", "pipe"])
def test_a_resume_skips_a_corrupt_checkpoint_and_never_takes_other_files(folder, log, how):
    checkpointer = Checkpointer(seeded_net(), str(folder), counter=Counter(1))
    for iteration in (1, 2, 3):
        checkpointer.save(f"model_{iteration}", iteration=iteration)
    checkpointer.save("model_best", tag_last=False, iteration=1000)
    torch.save(seeded_net(5).state_dict(), folder / "pretrained.pth")
    corrupt(folder / "model_3.pth", how)
    extra = Checkpointer(seeded_net(1), str(folder), counter=Counter()).resume_or_load("")
    assert extra == {"iteration": 2}
    assert any("model_3.pth" in record.getMessage() for record in log.records if record.levelname == "WARNING")
    for name in ("model_1.pth", "model_2.pth"):
        corrupt(folder / name, "cut")
    with pytest.raises(ConfigError, match="intact"):
        Checkpointer(seeded_net(1), str(folder)).resume_or_load("")


@pytest.mark.parametrize("checkpointables", [None, []])
@pytest.mark.parametrize("ours", [True, False])
def test_every_load_verifies_and_a_corrupt_file_does_not_change_the_model(folder, ours, checkpointables):
    Checkpointer(seeded_net(), str(folder)).save("model")
    if not ours:
        torch.save(seeded_net().state_dict(), folder / "model.pth")
    corrupt(folder / "model.pth", "bit")
    other = seeded_net(1)
    with pytest.raises(ConfigError, match=r"model\.pth"):
        Checkpointer(other).load(str(folder / "model.pth"), checkpointables)
    assert same(other, seeded_net(1))


@pytest.fixture
def run(tmp_path):
    """A copy of a run's folder, in which the latest checkpoint is the first by its name and its time."""
    for name, iteration in {"a": 12, "b": 1, "best": 14, "exception": 15}.items():
        content = {"model": seeded_net().state_dict(), "counter": {"value": name}, "iteration": iteration}
        torch.save(content, tmp_path / f"model_{name}.pth")
    (tmp_path / "model_torn.pth").write_bytes(b"PK")
    return tmp_path


def resumed(folder):
    counter = Counter()
    Checkpointer(seeded_net(), str(folder), counter=counter).resume_or_load("")
    return counter.value


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00garbage", b"model_9.pth", b"a/../b", b"\0", b"x" * 999])
def test_a_missing_or_wrong_last_checkpoint_falls_back_to_the_latest_iteration(run, log, content):
    if content is not None:
        (run / "last_checkpoint").write_bytes(content)
    assert resumed(run) == "a"
    assert any("Resuming from" in message and "model_a.pth" in message for message in log.messages)


def test_an_exception_checkpoint_is_resumed_only_if_last_checkpoint_names_it(run):
    (run / "model_a.pth").write_bytes(b"")
    assert resumed(run) == "b"
    (run / "last_checkpoint").write_text("model_exception.pth")
    assert resumed(run) == "exception"
