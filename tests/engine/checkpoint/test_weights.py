"""Finding and reading weights in all formats, and choosing between several."""

import functools
import http.server
import json
import os
import threading

import numpy as np
import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.weights import (
    averaged_weights,
    check_weights,
    choose_weights,
    find_checkpoint,
    read_checkpoint,
)

save_file = pytest.importorskip("safetensors.torch").save_file


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


STATE = net().state_dict()


def same(weights, other=STATE):
    return weights.keys() == other.keys() and all(torch.equal(weights[name], other[name]) for name in other)


def refused(path, call=read_checkpoint):
    with pytest.raises(ConfigError) as info:
        call(str(path))
    return str(info.value)


# ---------------------------------------------------------------------------- files


FILES = {
    "ours": {"model": STATE, "trainer": {"iteration": 3}},
    "plain": STATE,
    "a plain dict": dict(STATE),
    "detectron2": {
        "model": {name: value.numpy() for name, value in STATE.items()},
        "__author__": "someone",
        "matching_heuristics": True,
        "iteration": np.int64(3),
    },
    "lightning": {"state_dict": STATE, "epoch": 1, "pytorch-lightning_version": "2.4.0", "optimizer_states": [{}]},
    "a tutorial's": {"epoch": 1, "model_state_dict": STATE, "optimizer_state_dict": {"state": {}}},
    "deepspeed": {"module": STATE, "global_steps": 1},
    "with extra state": {**STATE, "0._extra_state": {"seen": 3}},
}


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_files_of_torch_save_by_all_tools_are_read(tmp_path, name, mmap):
    torch.save(FILES[name], tmp_path / "file.pth")
    got = read_checkpoint(str(tmp_path / "file.pth"), mmap=mmap)
    extra = got["model"].pop("0._extra_state", None)
    assert same(got["model"])
    assert extra == ({"seen": 3} if name == "with extra state" else None)


def test_other_content_of_a_file_is_read(tmp_path):
    torch.save(FILES["ours"], tmp_path / "file.pth")
    assert read_checkpoint(str(tmp_path / "file.pth"))["trainer"] == {"iteration": 3}


@pytest.mark.parametrize("name", ["file.safetensors", "file.bin"])
def test_safetensors_are_recognized_under_any_file_name(tmp_path, name):
    save_file(STATE, tmp_path / name, metadata={"format": "pt", "note": "mine"})
    got = read_checkpoint(str(tmp_path / name))
    assert same(got["model"])
    assert got["metadata"]["note"] == "mine"


def test_tied_weights_in_safetensors_are_read_under_all_their_names(tmp_path):
    from safetensors.torch import save_model

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "tied.safetensors"))
    assert same(read_checkpoint(str(tmp_path / "tied.safetensors"))["model"], model.state_dict())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "it holds a list, not a dict"),
        ({"weights": {"a": 1}}, "it has no 'model', only weights"),
        ({}, "it has no 'model', only nothing"),
    ],
)
def test_a_file_without_weights_is_refused_with_its_content(tmp_path, content, message):
    torch.save(content, tmp_path / "file.pth")
    assert refused(tmp_path / "file.pth").endswith(f"file.pth is not a checkpoint: {message}")


def test_a_truncated_safetensors_file_is_refused(tmp_path):
    path = tmp_path / "file.safetensors"
    save_file(STATE, path)
    path.write_bytes(path.read_bytes()[:-8])
    assert "file.safetensors is damaged" in refused(path)
    path.write_bytes(b"")
    assert "file.safetensors is damaged" in refused(path)


def test_a_missing_safetensors_package_is_an_error_with_advice(tmp_path, monkeypatch):
    save_file(STATE, tmp_path / "file.safetensors")
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    assert "pip install safetensors" in refused(tmp_path / "file.safetensors")


# ---------------------------------------------------------------------------- folders


def test_a_runs_folder_means_its_last_checkpoint(tmp_path):
    checkpointer = Checkpointer(net(), str(tmp_path))
    checkpointer.save("model_a", iteration=1)
    checkpointer.save("model_b", iteration=2)
    checkpointer.save("model_best", tag_last=False, iteration=9)
    assert find_checkpoint(str(tmp_path)) == str(tmp_path / "model_b.pth")
    got = read_checkpoint(str(tmp_path))
    assert same(got["model"])
    assert got["iteration"] == 2


def sharded(folder, files):
    folder.mkdir()
    places = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        save_file({name: STATE[name] for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.mark.parametrize("form", ["safetensors", "bin", "sharded"])
def test_hugging_faces_folders_are_read(tmp_path, form):
    folder = tmp_path / "hf"
    if form == "sharded":
        sharded(folder, [list(STATE)[:3], list(STATE)[3:]])
    else:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if form == "safetensors":
            save_file(STATE, folder / "model.safetensors")
        else:
            torch.save(STATE, folder / "pytorch_model.bin")
    assert same(read_checkpoint(str(folder))["model"])


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    folder = sharded(tmp_path / "hf", [list(STATE)[:3], list(STATE)[3:]])
    second = folder / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.unlink()
    assert "names missing files: model-00002-of-00002.safetensors" in refused(folder)
    save_file({"other": torch.ones(1)}, second)
    assert "its files lack 1.bias" in refused(folder)
    second.write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"0.weight": "../secret.safetensors"}}))
    assert "names no files of its folder" in refused(folder)
    index.write_text("{")
    assert "is damaged, or is not an index" in refused(folder)


def test_a_folder_without_weights_is_refused_with_advice(tmp_path):
    assert "last_checkpoint, model.safetensors, pytorch_model.bin or .metadata" in refused(tmp_path)
    torch.save(STATE, tmp_path / "model_final.pth")
    assert refused(tmp_path).endswith("name a file in it, such as model_final.pth")


def test_a_missing_last_checkpoint_is_named(tmp_path):
    (tmp_path / "last_checkpoint").write_text("model_7.pth")
    assert "points to" in refused(tmp_path)
    assert "model_7.pth, which does not exist" in refused(tmp_path)


@pytest.mark.parametrize("target", ["../other.pth", "/etc/passwd", "pipe", "x\x1b[2J", "loop"])
def test_a_last_checkpoint_that_names_no_checkpoint_of_its_folder_is_refused(tmp_path, target):
    torch.save(STATE, tmp_path / "other.pth")
    folder = tmp_path / "run"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    os.symlink(folder, folder / "loop")
    (folder / "last_checkpoint").write_text(target)
    message = refused(folder)
    assert "points to" in message
    assert message.isprintable()


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb", "a\u202eb", 7])
@pytest.mark.parametrize("averaged", [True, False])
def test_names_of_weights_cannot_write_to_the_terminal(tmp_path, name, averaged):
    state = {name: torch.ones(1)}
    hooks = {"EMA": {"averaged_model": state}}
    content = {"model": STATE, "trainer": {"hooks": hooks}} if averaged else {"model": state}
    torch.save(content, tmp_path / "model.pth")
    if averaged and isinstance(name, int):
        return  # not weights
    message = refused(tmp_path / "model.pth", lambda path: choose_weights(read_checkpoint(path), "auto"))
    assert f"a weight has the name {name!r}" in message
    assert message.isprintable()


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file whose reading fails")
@pytest.mark.parametrize("name", ["model.pth", "last_checkpoint", "model.safetensors.index.json"])
def test_an_unreadable_file_is_refused(tmp_path, name):
    (tmp_path / name).symlink_to("/proc/self/mem")
    for call in (read_checkpoint, check_weights):
        message = refused(tmp_path / name if name.startswith("model.") else tmp_path, call)
        assert "Input/output error" in message
        assert name in message


def test_a_misspelt_file_is_refused_with_the_nearest(tmp_path):
    torch.save(STATE, tmp_path / "model_final.pth")
    assert refused(tmp_path / "model_finl.pth").endswith(f"did you mean '{tmp_path}/model_final.pth'?")


def test_a_uri_is_downloaded(tmp_path, monkeypatch):
    served = tmp_path / "served"
    served.mkdir()
    torch.save({"model": STATE}, served / "net.pth")
    monkeypatch.setenv("IOPATH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        model, address = net(1), f"http://127.0.0.1:{server.server_port}"
        checkpointer = Checkpointer(model)
        checkpointer.load(f"{address}/net.pth", [])
        with pytest.raises(ConfigError, match=r"cannot read the checkpoint .*nothing\.pth"):
            checkpointer.load(f"{address}/nothing.pth", [])
        server.shutdown()
    assert same(model.state_dict())


# ---------------------------------------------------------------------------- averaged weights


AVERAGED = {name: value + 1 for name, value in STATE.items()}


def run_of(evaluate=True, **hooks):
    state = {"averaged_model": AVERAGED, "updates": 3, "evaluate": evaluate}
    return {"model": STATE, "trainer": {"hooks": {"LRScheduler": {}, "EMA": state, **hooks}}}


def test_averaged_weights_of_a_runs_hook_are_found():
    assert same(averaged_weights(run_of()), AVERAGED)
    assert averaged_weights({"model": STATE, "trainer": {"hooks": {"EMA": {}}}}) is None
    assert averaged_weights({"model": STATE}) is None


@pytest.mark.parametrize("key", ["model_ema", "ema_state_dict", "state_dict_ema", "ema"])
def test_averaged_weights_of_other_tools_are_found(key):
    assert same(averaged_weights({"model": STATE, key: AVERAGED}), AVERAGED)


@pytest.mark.parametrize(
    ("checkpoint", "source", "averaged"),
    [
        ({"model": STATE, "ema": AVERAGED}, "auto", False),  # nobody knows what was evaluated
        ({"model": STATE, "ema": AVERAGED}, "averaged", True),
        (run_of(), "auto", True),
        (run_of(evaluate=False), "auto", False),
        (run_of(evaluate=False), "averaged", True),
        (run_of(), "model", False),
        ({"model": STATE}, "auto", False),
    ],
)
def test_auto_chooses_the_weights_that_the_run_evaluated(checkpoint, source, averaged):
    weights, which = choose_weights(checkpoint, source)
    assert same(weights, AVERAGED if averaged else STATE)
    assert which.startswith("averaged by ") == averaged
    assert averaged or which == "model"


def test_the_evaluated_average_is_chosen_of_two():
    other = {"averaged_model": {name: value + 2 for name, value in STATE.items()}, "evaluate": False}
    checkpoint = run_of(SWA=other)
    checkpoint["trainer"]["hooks"] = dict(reversed(checkpoint["trainer"]["hooks"].items()))
    assert choose_weights(checkpoint)[1] == "averaged by EMA"


def test_averaged_weights_that_are_not_there_are_an_error():
    with pytest.raises(ConfigError, match="no averaged weights"):
        choose_weights({"model": STATE}, "averaged")


# ---------------------------------------------------------------------------- the check before a run


def test_check_weights_names_the_file_and_the_problem(tmp_path):
    path = tmp_path / "file.pth"
    torch.save({"model": STATE}, path)
    check_weights(str(path))
    with pytest.raises(ConfigError, match=r"file\.pth: it holds no averaged weights"):
        check_weights(str(path), "averaged")
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ConfigError, match=r"file\.pth is damaged"):
        check_weights(str(path))


def test_check_weights_detects_a_flipped_bit(tmp_path):
    class State:
        def state_dict(self):
            return {"iteration": 1}

    Checkpointer(net(), str(tmp_path), trainer=State()).save("model_1")
    path = tmp_path / "model_1.pth"
    check_weights(str(tmp_path))
    whole = path.read_bytes()
    place = whole.index(STATE["0.weight"].numpy().tobytes())
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(ConfigError, match=r"model_1\.pth is damaged: the checksum"):
        check_weights(str(tmp_path))


def test_files_are_not_changed_by_reading(tmp_path):
    path = tmp_path / "file.pth"
    torch.save({"model": STATE}, path)
    before = path.read_bytes()
    got = read_checkpoint(str(path), mmap=True)
    got["model"]["0.weight"].zero_()
    del got
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["file.pth"]
