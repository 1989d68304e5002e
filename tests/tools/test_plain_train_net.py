import os
import re

import pytest
from ranks import SYNTHETIC, rows
from small_runs import assert_equal_models


@pytest.fixture
def train(tool):
    return lambda *arguments: tool("plain_train_net.py", "--config-file", SYNTHETIC, *arguments)


CONSTANT = ("SOLVER.LR_SCHEDULER_NAME", "WarmupMultiStepLR", "SOLVER.WARMUP_ITERS", 0, "TEST.EVAL_PERIOD", 0)


def test_a_resumed_run_equals_the_uninterrupted_one(train, tmp_path):
    train("OUTPUT_DIR", "whole", "SOLVER.MAX_ITER", 60, *CONSTANT)
    train("OUTPUT_DIR", "parts", "SOLVER.MAX_ITER", 40, *CONSTANT)
    code, out, _ = train("OUTPUT_DIR", "parts", "SOLVER.MAX_ITER", 60, *CONSTANT, "--resume")
    assert code == 0
    assert "Starting training from iteration 40\n" in out
    assert [row["iteration"] for row in rows(tmp_path / "parts")] == [19, 39, 59, 60]
    assert_equal_models(tmp_path / "parts", tmp_path / "whole")
    assert rows(tmp_path / "parts")[-1]["synthetic/accuracy"] == rows(tmp_path / "whole")[-1]["synthetic/accuracy"]


def test_it_trains_evaluates_and_keeps_the_best_and_the_newest(train, tmp_path):
    keys = ("SOLVER.MAX_ITER", "4ep", "TEST.EVAL_PERIOD", "2ep", "SOLVER.CHECKPOINT_PERIOD", "1ep")
    code, out, err = train("OUTPUT_DIR", "run", *keys, "CHECKPOINT.MAX_TO_KEEP", 1, "LOG.PERIOD", 16)
    assert (code, err) == (0, "")
    found = rows(tmp_path / "run")
    assert [row["iteration"] for row in found if "synthetic/accuracy" in row] == [31, 64]
    assert [row["iteration"] for row in found if "total_loss" in row] == [15, 31, 47, 63]
    assert found[-1]["synthetic/accuracy"] > 0.4
    assert re.search(r"synthetic +accuracy +0\.\d+", out)
    weights = sorted(path.stem for path in (tmp_path / "run").glob("*.pth"))
    assert weights == ["model_0000063", "model_best", "model_final"]
    assert {"config.yaml", "log.txt", "metrics.json"} <= set(os.listdir(tmp_path / "run"))
