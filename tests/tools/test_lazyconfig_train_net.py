"""The command line of tools/lazyconfig_train_net.py."""

import sys

import pytest
import torch
from ranks import ROOT, finish, fork, rows
from run_tools import run_tool

pytest.importorskip("omegaconf")

CONFIG = ROOT / "configs" / "synthetic" / "mlp_lazy.py"
SHORT = ("train.max_iter=20", "train.log_period=5", "train.eval_period=10", "train.checkpointer.period=10")


@pytest.fixture
def tool(tmp_path, monkeypatch, capfd):
    """Run the tool in this process; returns its exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, config=CONFIG):
        return run_tool("lazyconfig_train_net.py", ("--config-file", config, *arguments), capfd)

    return run


def weights(path):
    return torch.load(path, weights_only=True)["model"]


def losses(folder):
    return [row["total_loss"] for row in rows(folder) if "total_loss" in row]


def test_a_lazy_config_trains_resumes_and_evaluates(tool, tmp_path):
    code, out, err = tool(*SHORT, "train.output_dir=run")
    assert (code, err) == (0, "")
    whole = rows(tmp_path / "run")
    assert [row["iteration"] for row in whole] == [4, 9, 14, 19, 20]
    before = losses(tmp_path / "run")
    assert whole[-1]["synthetic/accuracy"] > 0.4
    assert "completed" in out

    # As if it had been killed after its first checkpoint.
    (tmp_path / "run/model_final.pth").rename(tmp_path / "whole.pth")
    (tmp_path / "run/last_checkpoint").write_text("model_0000009.pth")
    code, out, err = tool(*SHORT, "train.output_dir=run", "--resume")
    assert (code, err) == (0, "")
    assert "Starting training from iteration 10" in out
    assert losses(tmp_path / "run") == before
    resumed = weights(tmp_path / "run/model_final.pth")
    assert all(torch.equal(value, resumed[name]) for name, value in weights(tmp_path / "whole.pth").items())

    code, out, err = tool("--eval-only", "train.init_checkpoint=whole.pth", "train.output_dir=look")
    assert (code, err) == (0, "")
    assert f"accuracy  {whole[-1]['synthetic/accuracy']:.5g}" in out


def test_the_saved_config_repeats_the_run(tool, tmp_path):
    assert tool("train.max_iter=5", "train.seed=-1", "train.output_dir=first")[0] == 0
    assert tool("train.output_dir=second", config=tmp_path / "first/config.yaml")[0] == 0
    first, second = (weights(tmp_path / name / "model_final.pth") for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_several_ranks_train(tmp_path):
    words = ("--config-file", CONFIG, "--num-gpus", 2, *SHORT, "train.output_dir=run")
    code, output = finish(fork([sys.executable, ROOT / "tools/lazyconfig_train_net.py", *words], tmp_path))
    assert code == 0, output
    assert [row["iteration"] for row in rows(tmp_path / "run")] == [4, 9, 14, 19, 20]
    assert len(list((tmp_path / "run").glob("events.*"))) == 1
