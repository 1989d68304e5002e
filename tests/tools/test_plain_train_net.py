import os
import re

import pytest
import torch
from ranks import SYNTHETIC, rows
from run_tools import run_tool


@pytest.fixture
def tool(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_tool("plain_train_net.py", ("--config-file", SYNTHETIC, *arguments), capfd)


def weights(folder):
    return torch.load(folder / "model_final.pth", weights_only=True)["model"]


CONSTANT = ("SOLVER.LR_SCHEDULER_NAME", "WarmupMultiStepLR", "SOLVER.WARMUP_ITERS", 0, "TEST.EVAL_PERIOD", 0)


def test_a_resumed_run_equals_the_uninterrupted_one(tool, tmp_path):
    tool("OUTPUT_DIR", "whole", "SOLVER.MAX_ITER", 60, *CONSTANT)
    tool("OUTPUT_DIR", "parts", "SOLVER.MAX_ITER", 40, *CONSTANT)
    code, out, _ = tool("OUTPUT_DIR", "parts", "SOLVER.MAX_ITER", 60, *CONSTANT, "--resume")
    assert code == 0
    assert "Starting training from iteration 40\n" in out
    assert [row["iteration"] for row in rows(tmp_path / "parts")] == [19, 39, 59, 60]
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert rows(tmp_path / "parts")[-1]["synthetic/accuracy"] == rows(tmp_path / "whole")[-1]["synthetic/accuracy"]


def test_it_trains_evaluates_and_keeps_the_best_and_the_newest(tool, tmp_path):
    keys = ("SOLVER.MAX_ITER", "4ep", "TEST.EVAL_PERIOD", "2ep", "SOLVER.CHECKPOINT_PERIOD", "1ep")
    code, out, err = tool("OUTPUT_DIR", "run", *keys, "CHECKPOINT.MAX_TO_KEEP", 1, "LOG.PERIOD", 16)
    assert (code, err) == (0, "")
    found = rows(tmp_path / "run")
    assert [row["iteration"] for row in found if "synthetic/accuracy" in row] == [31, 64]
    assert [row["iteration"] for row in found if "total_loss" in row] == [15, 31, 47, 63]
    assert found[-1]["synthetic/accuracy"] > 0.4
    assert re.search(r"synthetic +accuracy +0\.\d+", out)
    names = set(os.listdir(tmp_path / "run"))
    assert {name for name in names if name.endswith(".pth")} == {
        "model_0000063.pth",
        "model_best.pth",
        "model_final.pth",
    }
    assert {"config.yaml", "log.txt", "metrics.json"} <= names
