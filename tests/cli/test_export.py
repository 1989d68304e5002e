"""``hookline export``, on the files of a real run."""

import shutil

import pytest
import torch
from run_tools import run_command, train_synthetic
from safetensors.torch import load_file


@pytest.fixture
def command(trained, monkeypatch, capsys):
    """Run the command in this process, in the folder of the runs; return exit code, output and errors."""
    monkeypatch.chdir(trained)
    return lambda *arguments: run_command(["export", *arguments], capsys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a short run with EMA."""
    folder = tmp_path_factory.mktemp("trained")
    ema = '[{"NAME": "EMA", "ARGS": {"decay": 0.9}}]'
    train_synthetic(folder / "run", "HOOKS", ema)
    return folder


def weights(path, averaged):
    checkpoint = torch.load(path, weights_only=True)
    return checkpoint["trainer"]["hooks"]["EMA"]["averaged_model"] if averaged else checkpoint["model"]


@pytest.mark.parametrize(("option", "averaged"), [("auto", True), ("averaged", True), ("model", False)])
def test_the_weights_of_a_run_are_exported(command, trained, tmp_path, option, averaged):
    output = tmp_path / "net.safetensors"
    code, out, err = command("--checkpoint", "run", "--output", output, "--weights", option)
    assert (code, err) == (0, "")
    expected, got = weights(trained / "run" / "model_final.pth", averaged), load_file(output)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert f"weights: {'averaged by EMA' if averaged else 'model'}" in out
    assert "iteration: 4" in out
    assert "model: MLP" in out


def test_a_program_is_exported_with_the_runs_own_config(command, tmp_path):
    output = tmp_path / "net.pt2"
    code, out, err = command("--checkpoint", "run", "--output", output, "--trust-config")
    assert code == 0, err
    assert "batch_size: any" in out
    program = torch.export.load(str(output)).module()
    assert program(torch.randn(3, 8)).shape == (3, 4)


@pytest.mark.parametrize("output", ["net.pt2", "net.safetensors", "net.pth"])
def test_the_config_of_a_downloaded_folder_is_not_run(command, trained, tmp_path, monkeypatch, output):
    (tmp_path / "attack.py").write_text("open('attacked', 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(trained / "run", tmp_path / "downloaded")
    attack = (tmp_path / "downloaded" / "config.yaml").read_text().replace("NAME: MLP", "NAME: attack:Net")
    assert "attack:Net" in attack
    (tmp_path / "downloaded" / "config.yaml").write_text(attack)
    checkpoint = torch.load(trained / "run" / "model_final.pth", weights_only=True)
    checkpoint["trainer"]["run"]["config"] = attack
    torch.save(checkpoint, tmp_path / "downloaded" / "model_final.pth")
    code, out, _ = command("--checkpoint", tmp_path / "downloaded", "--output", tmp_path / output)
    assert code == (2 if output == "net.pt2" else 0)
    assert "attack:Net" in out or output != "net.safetensors"
    assert not (trained / "attacked").exists()
