"""``hookline inspect``, on the files of real runs."""

import json
import re

import pytest
import torch
import yaml
from run_tools import run_command, train_synthetic


@pytest.fixture
def command(trained, monkeypatch, capsys):
    """Run the command in this process, in the folder of the runs; return exit code, output and errors."""
    monkeypatch.chdir(trained)
    return lambda *arguments: run_command(["inspect", *arguments], capsys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run, one with the same seed, and one with another seed."""
    folder = tmp_path_factory.mktemp("trained")
    for name, seed in (("run", 1), ("same", 1), ("other", 2)):
        train_synthetic(folder / name, "SEED", seed)
    return folder


def test_the_content_of_a_run_is_printed(command):
    code, out, err = command("run")
    assert (code, err) == (0, "")
    title, *lines = out.splitlines()
    assert title == "run/model_final.pth: undamaged"
    report = yaml.safe_load("\n".join(lines))
    assert report["iteration"] == 4
    assert report.keys() >= {"optimizer", "megabytes"}
    assert "LRScheduler" in report["hooks"]
    assert report["config"]["MODEL.NAME"][1] == "MLP"
    assert report["config"]["SEED"][1] == 1
    assert report["weights"]["dtypes"] == ["float32"]
    assert re.fullmatch("[0-9a-f]{64}", report["weights"]["sha256"])


def test_equal_runs_have_equal_hashes(command):
    hashes = [json.loads(command(name, "--json")[1])["weights"]["sha256"] for name in ("run", "same", "other")]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_damaged_checkpoint_exits_with_1(command, trained, tmp_path):
    whole = (trained / "run" / "model_final.pth").read_bytes()
    for name, content in (("cut.pth", whole[: len(whole) // 2]), ("empty.pth", b"")):
        (tmp_path / name).write_bytes(content)
        code, out, err = command(tmp_path / name)
        assert (code, err) == (1, "")
        assert name in out
        assert json.loads(command(tmp_path / name, "--json")[1])["whole"] is False
    flipped = bytearray(whole)
    weights = torch.load(trained / "run" / "model_final.pth", weights_only=True)["model"]
    flipped[whole.index(next(iter(weights.values())).numpy().tobytes()) + 3] ^= 0x40
    (tmp_path / "flipped.pth").write_bytes(flipped)
    code, out, _ = command(tmp_path / "flipped.pth")
    assert code == 1
    assert "is damaged: the checksum of" in out


def test_a_checkpoint_runs_no_code_and_cannot_control_the_terminal(command, trained, tmp_path, monkeypatch):
    (tmp_path / "attack.py").write_text("open('attacked', 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = torch.load(trained / "run" / "model_final.pth", weights_only=True)
    config = checkpoint["trainer"]["run"]["config"].replace("NAME: MLP", "NAME: attack:Net")
    checkpoint["trainer"]["run"]["config"] = config + '"A\\x1b[2J": "\\x1b[2J"\n'
    checkpoint["trainer"]["hooks"]["Hook\x1b[2J"] = {"entry\x1b[2J": 1}
    checkpoint["other\x1b[2J"] = 1
    torch.save(checkpoint, tmp_path / "model.pth")
    for arguments in (["model.pth"], ["model.pth", "--json"]):
        _, out, err = command(*(tmp_path / one if one == "model.pth" else one for one in arguments))
        assert err == ""
        assert "attack:Net" in out
        assert "\x1b" not in out
        assert "\\e[2J" in out or len(arguments) == 2
    assert not (trained / "attacked").exists()


JUNK = [
    {"trainer": [1]},
    {"trainer": {"hooks": [1], "data": 3, "optimizer": "x", "iteration": "\x1b"}},
    {"trainer": {"run": {"config": "- 1"}}},
    {"trainer": {"run": {"config": "MODEL: 3"}}},
    {"trainer": {"run": {"config": "SOLVER: {OPTIMIZER: 3}"}}},
    {"trainer": {"hooks": {"EMA": {"averaged_model": [1]}}}, "ema": {"a": 1}},
]


def test_invalid_content_beside_the_weights_is_described_or_refused(command, tmp_path):
    for junk in JUNK:
        torch.save({"model": {"a": torch.ones(1)}, **junk}, tmp_path / "model.pth")
        code, out, err = command(tmp_path / "model.pth")
        assert code in (0, 1), junk
        assert err == "", junk
        assert "model.pth" in out
        assert "\x1b" not in out
