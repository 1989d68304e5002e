"""Finding and reading weights in all formats, choosing between several, and saving weights alone."""

import functools
import http.server
import io
import json
import os
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_runs import same, seeded_net
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer, save_weights
from hookline.engine.checkpoint.find_checkpoint import find_checkpoint
from hookline.engine.checkpoint.weights import choose_weights, read_checkpoint

STATE = seeded_net().state_dict()
AVERAGED = {name: value + 1 for name, value in STATE.items()}


def refused(path):
    with pytest.raises(ConfigError) as info:
        read_checkpoint(find_checkpoint(str(path)))
    return str(info.value)


FILES = {
    "ours": {"model": STATE, "trainer": {"iteration": 3}},
    "plain": STATE,
    "detectron2": {
        "model": {name: value.numpy() for name, value in STATE.items()},
        "__author__": "someone",
        "matching_heuristics": True,
        "iteration": np.int64(3),
    },
    "lightning": {"state_dict": STATE, "epoch": 1, "pytorch-lightning_version": "2.4.0", "optimizer_states": [{}]},
    "a tutorial's": {"epoch": 1, "model_state_dict": STATE, "optimizer_state_dict": {"state": {}}},
    "with extra state": {**STATE, "0._extra_state": {"seen": 3}},
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_torch_save_by_all_tools_are_read_and_not_changed(tmp_path, name):
    path = tmp_path / "file.pth"
    torch.save(FILES[name], path)
    before = path.read_bytes()
    for mmap in (False, True):
        got = read_checkpoint(str(path), mmap=mmap)
        assert got["model"].pop("0._extra_state", None) == ({"seen": 3} if name == "with extra state" else None)
        assert same(got["model"], STATE)
        assert got.get("trainer") == ({"iteration": 3} if name == "ours" else None)
    got["model"]["0.weight"].zero_()
    assert path.read_bytes() == before


def test_corrupt_files_are_refused_by_name(tmp_path, monkeypatch):
    path = tmp_path / "file.safetensors"
    save_file(STATE, path)
    for content in (path.read_bytes()[:-8], b""):
        path.write_bytes(content)
        assert "file.safetensors is corrupt" in refused(path)
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    assert "pip install safetensors" in refused(path)


def sharded(folder):
    """Write the weights as two files with an index."""
    folder.mkdir(exist_ok=True)
    places = {}
    for number, names in enumerate((list(STATE)[:3], list(STATE)[3:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: STATE[name] for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize(
    "write",
    [
        sharded,
        lambda folder: save_file(STATE, folder / "model.safetensors"),
        lambda folder: torch.save(STATE, folder / "pytorch_model.bin"),
    ],
    ids=["sharded", "safetensors", "bin"],
)
def test_hugging_faces_folders_are_read(tmp_path, write):
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path)
    assert same(read_checkpoint(find_checkpoint(str(tmp_path)))["model"], STATE)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    sharded(tmp_path)
    second = tmp_path / "model-00002-of-00002.safetensors"
    second.unlink()
    assert second.name in refused(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for content in (json.dumps({"weight_map": {"0.weight": "../secret.safetensors"}}), "{"):
        index.write_text(content)
        assert index.name in refused(tmp_path)


@pytest.mark.parametrize("target", ["model_7.pth", "../other.pth", "/etc/passwd", "x\x1b[2J"])
def test_a_folder_with_a_wrong_last_checkpoint_is_refused(tmp_path, target):
    torch.save(STATE, tmp_path / "other.pth")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "last_checkpoint").write_text(target)
    message = refused(folder)
    assert "last_checkpoint" in message
    assert message.isprintable()


def test_a_uri_is_downloaded(tmp_path, monkeypatch):
    served = tmp_path / "served"
    served.mkdir()
    torch.save({"model": STATE}, served / "net.pth")
    for name in ("IOPATH_CACHE", "FVCORE_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        model, address = seeded_net(1), f"http://127.0.0.1:{server.server_port}"
        Checkpointer(model).load(f"{address}/net.pth", [])
        with pytest.raises(ConfigError, match=r"nothing\.pth"):
            Checkpointer(model).load(f"{address}/nothing.pth", [])
        server.shutdown()
    assert same(model.state_dict(), STATE)


def run_of(evaluate=True, **hooks):
    state = {"averaged_model": AVERAGED, "updates": 3, "evaluate": evaluate}
    return {"model": STATE, "trainer": {"hooks": {"LRScheduler": {}, "EMA": state, **hooks}}}


@pytest.mark.parametrize(
    ("checkpoint", "source", "averaged"),
    [
        ({"model": STATE, "ema": AVERAGED}, "auto", False),  # nobody knows what was evaluated
        *(
            ({"model": STATE, key: AVERAGED}, "averaged", True)
            for key in ("model_ema", "ema_state_dict", "state_dict_ema", "ema")
        ),
        (run_of(), "auto", True),
        (run_of(evaluate=False), "auto", False),
        (run_of(evaluate=False), "averaged", True),
        (run_of(SWA={"averaged_model": STATE, "evaluate": False}), "auto", True),
        (run_of(), "model", False),
    ],
)
def test_auto_chooses_the_weights_that_the_run_evaluated(checkpoint, source, averaged):
    weights, which = choose_weights(checkpoint, source)
    assert same(weights, AVERAGED if averaged else STATE)
    assert which.startswith("averaged by " if averaged else "model")


def test_weights_alone_go_to_a_path_or_a_file_object(tmp_path):
    model = nn.DataParallel(nn.Linear(2, 1))
    for file in (tmp_path / "net.pth", io.BytesIO()):
        save_weights(model, file)
        if isinstance(file, io.BytesIO):
            file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert set(saved) == {"model"}
        assert same(saved["model"], model.module.state_dict())
    assert os.listdir(tmp_path) == ["net.pth"]
