import json
import os
import re
from pathlib import Path

import pytest
import torch
from run_tools import run_tool

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "plain_train_net.py"
SYNTHETIC = ROOT / "configs" / "synthetic" / "mlp.yaml"


@pytest.fixture
def tool(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_tool("plain_train_net.py", ("--config-file", SYNTHETIC, *arguments), capfd)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def weights(folder):
    return torch.load(folder / "model_final.pth", weights_only=True)["model"]


CONSTANT = ("SOLVER.LR_SCHEDULER_NAME", "WarmupMultiStepLR", "SOLVER.WARMUP_ITERS", 0, "TEST.EVAL_PERIOD", 0)


def test_a_run_trains_and_writes_its_files(tool, tmp_path):
    code, out, err = tool("OUTPUT_DIR", "run", "SOLVER.MAX_ITER", 50, "TEST.EVAL_PERIOD", 0)
    assert (code, err) == (0, "")
    names = os.listdir(tmp_path / "run")
    assert {"config.yaml", "log.txt", "metrics.json", "model_best.pth", "model_final.pth"} <= set(names)
    assert [row["iteration"] for row in rows(tmp_path / "run")] == [19, 39, 49, 50]
    assert rows(tmp_path / "run")[-1]["synthetic/accuracy"] > 0.4
    assert re.search(r"synthetic +accuracy +0\.\d+", out)


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


def test_eval_only_prints_the_last_results(tool, tmp_path):
    tool("OUTPUT_DIR", "run", "SOLVER.MAX_ITER", 20)
    last = rows(tmp_path / "run")[-1]["synthetic/accuracy"]
    code, out, _ = tool("OUTPUT_DIR", "run", "MODEL.WEIGHTS", "run/model_final.pth", "--eval-only")
    assert code == 0
    assert re.search(rf"synthetic +accuracy +{last:.5g}\n", out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["SOLVER.BASE_LRR", "0.1"], ["SOLVER.BASE_LRR", "did you mean 'SOLVER.BASE_LR'"]),
        (["MODEL.NAME", "MPL"], ["MODEL.NAME", "did you mean 'MLP'"]),
        (["MODEL.WEIGHTS", "nowhere.pth"], ["MODEL.WEIGHTS", "nowhere.pth"]),
        (["--num-gpus", "2"], ["--num-gpus 2", "in one process"]),
    ],
)
def test_bad_input_exits_with_2_one_message_and_no_folder(tool, tmp_path, arguments, words):
    code, _, err = tool("OUTPUT_DIR", "run", *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert all(word in err for word in words)
    assert os.listdir(tmp_path) == []


def test_the_learning_rate_follows_the_schedule(tool, tmp_path):
    tool("OUTPUT_DIR", "run", "SOLVER.MAX_ITER", 60, *CONSTANT, "SOLVER.STEPS", "(30,)", "SOLVER.BASE_LR", 0.1)
    assert [row["lr"] for row in rows(tmp_path / "run") if "lr" in row] == pytest.approx([0.1, 0.01, 0.01])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--predict"], ["--predict: this loop has no such option"]),
        (["--dry-run"], ["--dry-run: this loop has no such option"]),
        (["--eval-only"], ["--eval-only: set DATASETS.TEST, and MODEL.WEIGHTS or --resume"]),
        (["SOLVER.AMP.ENABLED", "True"], ["SOLVER.AMP.ENABLED: this loop does not follow the key"]),
        (["HOOKS", "['Throughput']"], ["HOOKS: this loop does not follow the key"]),
    ],
)
def test_an_option_or_key_that_the_loop_does_not_follow_is_refused(tool, tmp_path, arguments, words):
    code, _, err = tool("OUTPUT_DIR", "run", *arguments)
    assert code == 2
    assert all(word in err for word in words), err
    assert os.listdir(tmp_path) == []


def test_it_evaluates_and_keeps_the_best_and_the_newest(tool, tmp_path):
    keys = ("SOLVER.MAX_ITER", "4ep", "TEST.EVAL_PERIOD", "2ep", "SOLVER.CHECKPOINT_PERIOD", "1ep")
    code, _, err = tool("OUTPUT_DIR", "run", *keys, "CHECKPOINT.MAX_TO_KEEP", 1, "LOG.PERIOD", 16)
    assert (code, err) == (0, "")
    found = rows(tmp_path / "run")
    assert [row["iteration"] for row in found if "synthetic/accuracy" in row] == [31, 64]
    assert [row["iteration"] for row in found if "total_loss" in row] == [15, 31, 47, 63]
    names = {name for name in os.listdir(tmp_path / "run") if name.endswith(".pth")}
    assert names == {"model_0000063.pth", "model_best.pth", "model_final.pth"}


def test_a_missed_expectation_is_exit_code_1(tool):
    expected = "[['synthetic', 'accuracy', 2.0, 0.1]]"
    assert tool("OUTPUT_DIR", "run", "SOLVER.MAX_ITER", 2, "TEST.EXPECTED_RESULTS", expected)[0] == 1


def test_the_console_level(tool, tmp_path):
    code, out, _ = tool("OUTPUT_DIR", "run", "SOLVER.MAX_ITER", 2, "LOG.LEVEL", "ERROR")
    assert (code, out) == (0, "")
    assert "Starting training" in (tmp_path / "run" / "log.txt").read_text()
    assert tool("OUTPUT_DIR", "run", "LOG.LEVEL", "INFOS")[0] == 2
