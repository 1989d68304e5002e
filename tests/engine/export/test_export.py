"""Exported files hold the model, are atomic, and can be read by other tools."""

import io
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import hookline
from hookline.config import ConfigError, get_cfg
from hookline.engine import export_weights
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.weights import read_checkpoint
from hookline.engine.export.export import export_program
from hookline.engine.modeling import build_model


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


STATE = net().state_dict()
AVERAGED = {name: value + 1 for name, value in STATE.items()}


def same(weights, other=STATE):
    return weights.keys() == other.keys() and all(torch.equal(weights[name], other[name]) for name in other)


class Trainer:
    def __init__(self, evaluate=True):
        cfg = get_cfg()
        cfg.MODEL.NAME = "Net"
        hooks = {"EMA": {"averaged_model": AVERAGED, "evaluate": evaluate}}
        self.state = {"iteration": 99, "hooks": hooks, "run": {"config": cfg.dump()}}

    def state_dict(self):
        return self.state


@pytest.fixture
def run(tmp_path):
    Checkpointer(net(), str(tmp_path / "run"), trainer=Trainer(evaluate=False)).save("model_final")
    return str(tmp_path / "run")


# ---------------------------------------------------------------------------- weights


def test_a_safetensors_file_holds_the_weights_and_their_origin(run, tmp_path):
    path = str(tmp_path / "net.safetensors")
    done = export_weights(run, path)
    assert same(load_file(path))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == done.metadata
    assert done.metadata == {
        "format": "pt",
        "hookline": hookline.__version__,
        "iteration": "99",
        "model": "Net",
        "weights": "model",
    }
    assert (done.path, done.format, done.weights, done.bytes) == (path, "safetensors", 7, 21 * 4 + 8)


@pytest.mark.parametrize("name", ["net.pth", "net.pt", "net.bin"])
def test_a_pth_file_holds_a_plain_state_dict(run, tmp_path, name):
    done = export_weights(run, tmp_path / name)
    assert same(torch.load(tmp_path / name, weights_only=True))
    assert done.format == "pth"
    net(1).load_state_dict(torch.load(tmp_path / name, weights_only=True))


@pytest.mark.parametrize("name", ["net.safetensors", "net.pth"])
def test_exported_weights_can_be_a_warm_start(run, tmp_path, name):
    export_weights(run, tmp_path / name)
    model = net(1)
    Checkpointer(model).load(str(tmp_path / name), [], strict=True)
    assert same(model.state_dict())


def test_averaged_weights_are_exported_on_request_and_where_the_run_evaluated_them(tmp_path):
    for evaluate in (True, False):
        Checkpointer(net(), str(tmp_path), trainer=Trainer(evaluate)).save(f"model_{evaluate}")
        for source in ("auto", "model", "averaged"):
            done = export_weights(tmp_path / f"model_{evaluate}.pth", tmp_path / "out.safetensors", weights=source)
            averaged = source == "averaged" or (source == "auto" and evaluate)
            assert same(load_file(tmp_path / "out.safetensors"), AVERAGED if averaged else STATE)
            assert done.metadata["weights"] == ("averaged by EMA" if averaged else "model")


def test_neither_the_source_nor_a_file_of_a_run_is_replaced(run, tmp_path):
    checkpoint = os.path.join(run, "model_final.pth")
    content = Path(checkpoint).read_bytes()
    for source in (run, checkpoint):
        with pytest.raises(ConfigError, match=r"model_final\.pth: is also the input"):
            export_weights(source, checkpoint)
    (tmp_path / "run" / "config.yaml").touch()
    for name in ("model_final.pth", "model_0000009.pth", "rolling_0000009.pth", "model_best.pth"):
        with pytest.raises(ConfigError, match=rf"{name}: is a file of the run in .*/run, which needs it"):
            export_weights(net(), os.path.join(run, name))
    assert Path(checkpoint).read_bytes() == content
    assert export_weights(run, os.path.join(run, "model_half.pth"), dtype="float16").weights == 7


def test_averaged_weights_that_are_not_there_are_an_error(tmp_path):
    torch.save({"model": STATE}, tmp_path / "in.pth")
    with pytest.raises(ConfigError, match=r"in\.pth: it holds no averaged weights"):
        export_weights(tmp_path / "in.pth", tmp_path / "out.pth", weights="averaged")
    assert os.listdir(tmp_path) == ["in.pth"]


def test_a_model_is_exported_without_a_checkpoint_and_without_its_wrapper(tmp_path):
    export_weights(nn.DataParallel(net()), tmp_path / "net.safetensors")
    assert same(load_file(tmp_path / "net.safetensors"))


@pytest.mark.parametrize("name", ["net.safetensors", "net.pth"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtype_converts_only_floating_point_weights(run, tmp_path, dtype, name):
    export_weights(run, tmp_path / name, dtype=dtype)
    got = read_checkpoint(str(tmp_path / name))["model"]
    assert got["1.num_batches_tracked"].dtype == torch.int64
    assert got["0.weight"].dtype == getattr(torch, dtype)
    assert torch.equal(got["0.weight"], STATE["0.weight"].to(getattr(torch, dtype)))


def test_a_value_that_the_dtype_cannot_hold_is_an_error(tmp_path):
    torch.save({"a": torch.tensor([1.0, 7e4])}, tmp_path / "in.pth")
    with pytest.raises(ConfigError, match=r"a has values up to 7e\+04, which float16 cannot hold"):
        export_weights(tmp_path / "in.pth", tmp_path / "out.pth", dtype="float16")
    assert os.listdir(tmp_path) == ["in.pth"]


def test_tied_weights_are_stored_once_and_read_under_both_names(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    export_weights(model, tmp_path / "net.safetensors")
    assert "1.weight" not in load_file(tmp_path / "net.safetensors")
    assert same(read_checkpoint(str(tmp_path / "net.safetensors"))["model"], model.state_dict())
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other[1].weight = other[0].weight
    load_model(other, tmp_path / "net.safetensors")  # safetensors' own way back
    assert same(other.state_dict(), model.state_dict())


def test_views_of_one_tensor_are_written_separately(tmp_path):
    whole = torch.arange(6.0)
    state = {"a": whole[:3], "b": whole[2:], "c": whole.view(2, 3).t(), "empty": torch.zeros(0)}
    torch.save(state, tmp_path / "in.pth")
    export_weights(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert same(load_file(tmp_path / "out.safetensors"), state)


def test_extra_state_can_only_be_exported_to_pth(tmp_path):
    torch.save({**STATE, "0._extra_state": {"seen": 3}}, tmp_path / "in.pth")
    with pytest.raises(ConfigError, match=r"0\._extra_state .* is not one; use the format pth"):
        export_weights(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert os.listdir(tmp_path) == ["in.pth"]
    export_weights(tmp_path / "in.pth", tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth", weights_only=True)["0._extra_state"] == {"seen": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": "net.xyz"}, r"net\.xyz: the extension names no format \(known: \.safetensors, \.pth"),
        ({"output": "net.pth", "format": "safetensor"}, "unknown format 'safetensor'.*did you mean 'safetensors'"),
        ({"output": "nowhere/net.pth"}, "there is no folder nowhere"),
        ({"output": "run", "format": "pth"}, "run is a folder; give the name of a file"),
        ({"output": "net.pth", "dtype": "float_16"}, "unknown dtype 'float_16'.*did you mean 'float16'"),
        ({"output": "net.pth", "source": "runn"}, "there is no file runn; did you mean 'run'"),
    ],
)
def test_bad_arguments_are_errors_that_say_what_to_do(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        export_weights(**{"source": "run", **arguments})
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("name", ["net.safetensors", "net.pth"])
def test_a_full_disk_keeps_the_earlier_file(run, tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("before")

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            export_weights(run, tmp_path / name)
    assert (tmp_path / name).read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == sorted([name, "run"])


def test_exported_files_have_the_usual_permissions(run, tmp_path):
    modes = set()
    for name in ("net.safetensors", "net.pth", "plain"):
        if name == "plain":
            (tmp_path / name).write_text("")
        else:
            export_weights(run, tmp_path / name)
        modes.add((tmp_path / name).stat().st_mode)
    assert len(modes) == 1


# ---------------------------------------------------------------------------- programs


class Fixed(nn.Module):
    """Takes only batches of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x.reshape(16, 8))


class Undecided(Fixed):
    """Has control flow that depends on the input."""

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


def synthetic(tmp_path, **model):
    cfg = get_cfg()
    cfg.merge_from_file("configs/synthetic/mlp.yaml")
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "DATALOADER.BATCH_SIZE", 16])
    for key, value in model.items():
        cfg.MODEL[key] = value
    torch.manual_seed(0)
    built = build_model(cfg).eval()
    torch.save(built.state_dict(), tmp_path / "weights.pth")
    cfg.MODEL.WEIGHTS = str(tmp_path / "weights.pth")
    return cfg, built


def test_a_program_gives_the_models_outputs_for_batches_of_any_size(tmp_path):
    cfg, model = synthetic(tmp_path)
    done = export_program(cfg, tmp_path / "net.pt2")
    assert (done.format, done.batch_size) == ("torch-export", 0)
    extra = {"hookline.json": ""}
    program = torch.export.load(str(tmp_path / "net.pt2"), extra_files=extra).module()
    assert json.loads(extra["hookline.json"])["model"] == "MLP"
    with torch.no_grad():
        for size in (1, 5, 16, 40):
            x = torch.randn(size, 8)
            torch.testing.assert_close(program(x), model(x))


def test_a_model_that_takes_one_batch_size_is_exported_with_it(tmp_path):
    cfg, _ = synthetic(tmp_path, NAME=f"{__name__}:Fixed", ARGS={})
    assert export_program(cfg, tmp_path / "net.pt2").batch_size == 16


def test_a_model_that_cannot_be_traced_is_an_error_and_writes_nothing(tmp_path):
    cfg, _ = synthetic(tmp_path, NAME=f"{__name__}:Undecided", ARGS={})
    with pytest.raises(ConfigError, match=r"torch\.export cannot trace Undecided"):
        export_program(cfg, tmp_path / "net.pt2")
    assert os.listdir(tmp_path) == ["weights.pth"]


def test_a_program_with_other_outputs_than_the_model_is_an_error_and_writes_nothing(tmp_path, monkeypatch):
    cfg, _ = synthetic(tmp_path)
    wrong = nn.Sequential(nn.Linear(8, 4))
    program = torch.export.export(wrong, (torch.randn(2, 8),))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    monkeypatch.setattr(torch.export, "load", lambda file, load=torch.export.load: load(io.BytesIO(buffer.getvalue())))
    with pytest.raises(ConfigError, match="the exported program's outputs differ"):
        export_program(cfg, tmp_path / "net.pt2")
    assert os.listdir(tmp_path) == ["weights.pth"]


def test_a_program_of_weights_of_another_model_is_refused(tmp_path):
    cfg, _ = synthetic(tmp_path)
    weights = torch.load(cfg.MODEL.WEIGHTS, weights_only=True)
    weights.popitem()
    torch.save(weights, cfg.MODEL.WEIGHTS)
    with pytest.raises(ConfigError, match="is of another model: it has no"):
        export_program(cfg, tmp_path / "net.pt2")
