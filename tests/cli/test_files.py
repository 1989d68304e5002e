"""``hookline inspect`` and ``hookline export``, on the files of a real run."""

import json
import shutil

import pytest
import torch
import yaml
from loggers import unchanged_logging
from run_tools import run_command
from safetensors.torch import load_file

from hookline.cli import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a short run with EMA."""
    folder = tmp_path_factory.mktemp("trained")
    keys = (
        "OUTPUT_DIR",
        f"{folder}/run",
        "MODEL.DEVICE",
        "cpu",
        "SOLVER.MAX_ITER",
        "5",
        "LOG.WRITERS",
        "[]",
        "SEED",
        "1",
    )
    with unchanged_logging():
        assert main(["train", "--config-file", "synthetic/mlp.yaml", *keys, "HOOKS", '["EMA"]']) == 0
    return folder


@pytest.fixture
def command(trained, monkeypatch, capsys):
    """Run ``hookline`` in the folder of the runs; return exit code, standard output and standard error."""
    monkeypatch.chdir(trained)
    return lambda *words: run_command(words, capsys)


@pytest.fixture
def attack(trained, tmp_path, monkeypatch):
    """A checkpoint whose config names a module that leaves a file where it is imported."""
    (tmp_path / "attack.py").write_text("open('attacked', 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = torch.load(trained / "run/model_final.pth", weights_only=True)
    config = checkpoint["trainer"]["run"]["config"].replace("NAME: MLP", "NAME: attack:Net")
    assert "attack:Net" in config
    checkpoint["trainer"]["run"]["config"] = config
    yield checkpoint
    assert not (trained / "attacked").exists()


# ---------------------------------------------------------------------- inspect


def test_the_content_of_a_run_is_printed(command):
    code, out, err = command("inspect", "run")
    assert (code, err) == (0, "")
    title, *lines = out.splitlines()
    assert title == "run/model_final.pth: intact"
    report, described = yaml.safe_load("\n".join(lines)), json.loads(command("inspect", "run", "--json")[1])
    assert report["iteration"] == described["iteration"] == 4
    assert report["config"]["MODEL.NAME"][1] == "MLP"
    assert report["weights"]["sha256"] == described["weights"]["sha256"]


def test_a_corrupt_checkpoint_exits_with_1(command, trained, tmp_path):
    whole = (trained / "run/model_final.pth").read_bytes()
    weights = torch.load(trained / "run/model_final.pth", weights_only=True)["model"]
    flipped = bytearray(whole)
    flipped[whole.index(next(iter(weights.values())).numpy().tobytes()) + 3] ^= 0x40
    for name, content in (("cut.pth", whole[: len(whole) // 2]), ("empty.pth", b""), ("flipped.pth", flipped)):
        (tmp_path / name).write_bytes(content)
        code, out, err = command("inspect", tmp_path / name)
        assert (code, err) == (1, "")
        assert name in out
    assert "is corrupt: the checksum of" in out
    assert json.loads(command("inspect", tmp_path / "cut.pth", "--json")[1])["whole"] is False


def test_a_checkpoint_runs_no_code_and_cannot_control_the_terminal(command, attack, tmp_path):
    attack["trainer"]["run"]["config"] += '"A\\x1b[2J": "\\x1b[2J"\n'
    attack["trainer"]["hooks"]["Hook\x1b[2J"] = {"entry\x1b[2J": 1}
    attack["other\x1b[2J"] = 1
    torch.save(attack, tmp_path / "model.pth")
    for options in ((), ("--json",)):
        _, out, err = command("inspect", tmp_path / "model.pth", *options)
        assert err == ""
        assert "attack:Net" in out
        assert "\x1b" not in out
        assert "\\e[2J" in out or options


JUNK = [
    {"trainer": [1]},
    {"trainer": {"hooks": [1], "data": 3, "optimizer": "x", "iteration": "\x1b"}},
    {"trainer": {"run": {"config": "- 1"}}},
    {"trainer": {"run": {"config": "SOLVER: {OPTIMIZER: 3}"}}},
    {"trainer": {"hooks": {"EMA": {"averaged_model": [1]}}}, "ema": {"a": 1}},
]


def test_invalid_content_beside_the_weights_is_described_or_refused(command, tmp_path):
    for junk in JUNK:
        torch.save({"model": {"a": torch.ones(1)}, **junk}, tmp_path / "model.pth")
        code, out, err = command("inspect", tmp_path / "model.pth")
        assert code in (0, 1), junk
        assert err == "", junk
        assert "model.pth" in out
        assert "\x1b" not in out


# ---------------------------------------------------------------------- export


@pytest.mark.parametrize(("option", "averaged"), [("auto", True), ("averaged", True), ("model", False)])
def test_the_weights_of_a_run_are_exported(command, trained, tmp_path, option, averaged):
    output = tmp_path / "net.safetensors"
    code, out, err = command("export", "--checkpoint", "run", "--output", output, "--weights", option)
    assert (code, err) == (0, "")
    checkpoint, got = torch.load(trained / "run/model_final.pth", weights_only=True), load_file(output)
    expected = checkpoint["trainer"]["hooks"]["EMA"]["averaged_model"] if averaged else checkpoint["model"]
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert f"weights: {'averaged by EMA' if averaged else 'model'}" in out


def test_the_weights_of_a_run_are_exported_in_shards(command, trained, tmp_path):
    output = tmp_path / "shards"
    words = ("export", "--checkpoint", "run", "--weights", "model", "--output", f"{output}/", "--max-shard-size")
    code, out, err = command(*words, "1KB")
    assert (code, err) == (0, "")
    assert f"{output}/: 4 weights" in out
    expected = torch.load(trained / "run/model_final.pth", weights_only=True)["model"]
    got = {name: value for file in output.glob("*.safetensors") for name, value in load_file(file).items()}
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    code, _, err = command(*words, "1KB")
    assert (code, f"{output}/: shards are written to a new or empty folder" in err) == (2, True)


def test_a_program_is_exported_with_the_runs_own_config(command, tmp_path):
    output = tmp_path / "net.pt2"
    code, out, err = command("export", "--checkpoint", "run", "--output", output, "--trust-config")
    assert code == 0, err
    assert "batch_size: any" in out
    program = torch.export.load(str(output)).module()
    assert program(torch.randn(3, 8)).shape == (3, 4)


@pytest.mark.parametrize(("output", "expected"), [("net.pt2", 2), ("net.safetensors", 0), ("net.pth", 0)])
def test_the_config_of_a_downloaded_folder_is_not_run(command, trained, tmp_path, attack, output, expected):
    downloaded = shutil.copytree(trained / "run", tmp_path / "downloaded")
    (downloaded / "config.yaml").write_text(attack["trainer"]["run"]["config"])
    torch.save(attack, downloaded / "model_final.pth")
    assert command("export", "--checkpoint", downloaded, "--output", tmp_path / output)[0] == expected
