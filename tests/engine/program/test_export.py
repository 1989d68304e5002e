"""Exported files hold the model, are atomic, and can be read by other tools."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from small_runs import same, seeded_net
from torch import nn

import hookline
from hookline.config import ConfigError, get_cfg
from hookline.engine import export_weights
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.weights import read_checkpoint
from hookline.engine.modeling import build_model
from hookline.engine.program.export import export_program
from hookline.runs.reading import check_output

STATE = seeded_net().state_dict()
AVERAGED = {name: value + 1 for name, value in STATE.items()}


@pytest.fixture
def run(tmp_path):
    cfg = get_cfg()
    cfg.MODEL.NAME = "Net"
    hooks = {"EMA": {"averaged_model": AVERAGED, "evaluate": False}}
    trainer = {"iteration": 99, "hooks": hooks, "run": {"config": cfg.dump()}}
    (tmp_path / "run").mkdir()
    torch.save({"model": STATE, "trainer": trainer, "iteration": 99}, tmp_path / "run/model_final.pth")
    (tmp_path / "run/last_checkpoint").write_text("model_final.pth")
    return str(tmp_path / "run")


@pytest.mark.parametrize("name", ["net.pth", "net.bin", "net.safetensors"])
def test_exported_weights_are_those_of_the_run_and_can_be_a_warm_start(run, tmp_path, name):
    done = export_weights(run, tmp_path / name)
    if name == "net.safetensors":
        assert same(load_file(tmp_path / name), STATE)
        with safe_open(tmp_path / name, framework="pt") as file:
            assert file.metadata() == done.metadata
        origin = {"hookline": hookline.__version__, "iteration": "99", "model": "Net", "weights": "model"}
        assert done.metadata == {"format": "pt", **origin}
        assert (done.format, done.weights, done.bytes) == ("safetensors", 7, 21 * 4 + 8)
    else:
        assert same(torch.load(tmp_path / name, weights_only=True), STATE)
    model = seeded_net(1)
    Checkpointer(model).load(str(tmp_path / name), [], strict=True)
    assert same(model, STATE)
    (tmp_path / "plain").touch()
    assert (tmp_path / name).stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_neither_the_source_nor_a_file_of_a_run_is_replaced(run, tmp_path):
    checkpoint = os.path.join(run, "model_final.pth")
    content = Path(checkpoint).read_bytes()
    (tmp_path / "run" / "config.yaml").touch()
    torch.save(STATE, tmp_path / "in.pth")
    given = tmp_path / "in.pth"
    for source, name in (
        *((run, "model_final.pth"), (checkpoint, "model_final.pth"), (given, "model_final.pth")),
        *((given, "model_0000009.pth"), (given, "rolling_0000009.pth"), (given, "model_best.pth")),
    ):
        with pytest.raises(ConfigError, match=name):
            export_weights(source, os.path.join(run, name))
    assert Path(checkpoint).read_bytes() == content
    assert export_weights(run, os.path.join(run, "model_plain.pth")).weights == 7


@pytest.mark.parametrize("name", ["net.pth", "net.safetensors"])
def test_only_an_empty_file_or_an_earlier_export_is_replaced(run, tmp_path, name):
    path = tmp_path / "new" / name
    for _ in range(2):
        export_weights(run, path)
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is no output of hookline"):
        export_weights(run, path)
    assert path.read_text() == "mine"
    path.write_text("")
    export_weights(run, path)


def test_tied_weights_are_stored_once_and_read_under_both_names_and_views_separately(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        return model

    model, other, whole = tied(), tied(), torch.arange(6.0)
    views = {"a": whole[:3], "b": whole[2:], "c": whole.view(2, 3).t(), "empty": torch.zeros(0)}
    torch.save({**model.state_dict(), **views}, tmp_path / "in.pth")
    export_weights(tmp_path / "in.pth", tmp_path / "net.safetensors")
    assert "1.weight" not in load_file(tmp_path / "net.safetensors")
    assert same(read_checkpoint(str(tmp_path / "net.safetensors"))["model"], {**model.state_dict(), **views})
    load_model(other, tmp_path / "net.safetensors", strict=False)  # safetensors' own way back
    assert same(other, model)


def test_what_safetensors_cannot_hold_and_files_that_are_not_plain_are_refused(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({**STATE, "0._extra_state": {"seen": 3}}, "in.pth")
    for source, output, options, message in (
        ("run", "/dev/null", {"format": "pth"}, "is no output of hookline"),
        ("in.pth", "net.safetensors", {}, r"0\._extra_state"),
        ("in.pth", "shards", {"max_shard_size": "5GB"}, r"0\._extra_state \(the extra state of a module\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            export_weights(source, output, **options)
    assert sorted(os.listdir(tmp_path)) == ["in.pth", "run"]
    export_weights("in.pth", "out.pth")
    assert torch.load("out.pth", weights_only=True)["0._extra_state"] == {"seen": 3}


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
    cfg.MODEL.update(model)
    built = build_model(cfg).eval()
    cfg.MODEL.WEIGHTS = str(tmp_path / "weights.pth")
    torch.save(built.state_dict(), cfg.MODEL.WEIGHTS)
    return cfg, built


def test_a_program_gives_the_models_outputs_for_batches_of_any_size(tmp_path):
    cfg, model = synthetic(tmp_path)
    done = export_program(cfg, tmp_path / "net.pt2")
    assert (done.format, done.metadata["batch_size"]) == ("torch-export", "any")
    extra = {"hookline.json": ""}
    program = torch.export.load(str(tmp_path / "net.pt2"), extra_files=extra).module()
    assert json.loads(extra["hookline.json"])["model"] == "MLP"
    with torch.no_grad():
        for size in (1, 16, 40):
            x = torch.randn(size, 8)
            torch.testing.assert_close(program(x), model(x))
    cfg, _ = synthetic(tmp_path, NAME=f"{__name__}:Fixed", ARGS={})
    assert export_program(cfg, tmp_path / "net.pt2").metadata["batch_size"] == "16"


def test_a_model_that_cannot_be_traced_or_has_other_weights_is_an_error(tmp_path):
    cfg, _ = synthetic(tmp_path, NAME=f"{__name__}:Undecided", ARGS={})
    with pytest.raises(ConfigError, match="Undecided"):
        export_program(cfg, tmp_path / "net.pt2")
    torch.save({"layer.weight": torch.ones(4, 8)}, cfg.MODEL.WEIGHTS)
    with pytest.raises(ConfigError, match="another model"):
        export_program(cfg, tmp_path / "net.pt2")
    assert os.listdir(tmp_path) == ["weights.pth"]


@pytest.mark.slow
def test_an_onnx_file_gives_the_models_outputs_for_batches_of_any_size(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    cfg, model = synthetic(tmp_path)
    done = export_program(cfg, tmp_path / "net.onnx", "onnx")
    assert (done.format, done.metadata["batch_size"]) == ("onnx", "any")
    check_output(str(tmp_path / "net.onnx"))  # another export may replace it
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    x = torch.randn(3, 8)
    [outputs] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), model(x))


class Scores(nn.Module):
    """Returns (scores, loss), as nanoGPT does."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x, y=None):
        scores = self.fc(x)
        return scores, None if y is None else nn.functional.cross_entropy(scores, y)


def test_a_program_of_a_model_that_computes_its_loss_takes_no_target(tmp_path):
    cfg = get_cfg()
    cfg.merge_from_file("synthetic/mlp.yaml")
    cfg.merge_from_list(["MODEL.NAME", f"{__name__}:Scores", "MODEL.ARGS", {}, "MODEL.LOSS.NAME", ""])
    torch.save(Scores().state_dict(), tmp_path / "scores.pth")
    cfg.MODEL.WEIGHTS = str(tmp_path / "scores.pth")
    export_program(cfg, tmp_path / "scores.pt2")
    scores, loss = torch.export.load(tmp_path / "scores.pt2").module()(torch.zeros(3, 8))
    assert scores.shape == (3, 4)
    assert loss is None
