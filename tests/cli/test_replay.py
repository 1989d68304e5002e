"""``hookline replay`` and ``hookline samples``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT
from small_runs import config_trainer

from hookline.cli import main

RUN = (
    *("LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 1, "LOG.PROGRESS_BAR", False, "SOLVER.MAX_ITER", 10),
    *("DATASETS.TEST", []),
)


@pytest.fixture
def run(tmp_path):
    config_trainer(tmp_path / "run", *RUN).train()
    return str(tmp_path / "run")


def test_the_commands_print_the_step_and_its_samples(run, capsys):
    capsys.readouterr()
    assert main(["replay", run, "--iter", "8", "--set", "LOG.PERIOD", "1"]) == 0
    text = capsys.readouterr().out
    assert "from checkpoint model_0000006.pth" in text
    assert "equal metrics.json to the bit" in text
    assert f"Wrote {run}/replay_8/report.json" in text
    assert main(["samples", run, "--iter", "8"]) == 0
    indices = capsys.readouterr().out.split()
    report = json.loads(Path(run, "replay_8", "report.json").read_text())
    assert indices == [str(sample["index"]) for sample in report["samples"]]


@pytest.mark.slow
def test_a_run_of_two_ranks_is_replayed_with_two(tmp_path):
    train = [sys.executable, "tools/train_net.py", "--config-file", "configs/synthetic/mlp.yaml", "--num-gpus", "2"]
    options = ["MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(tmp_path / "two"), "SOLVER.CHECKPOINT_PERIOD", "10"]
    subprocess.run([*train, *options, "SOLVER.MAX_ITER", "20", "LOG.PERIOD", "1"], cwd=ROOT, check=True)
    replay = [sys.executable, "-m", "hookline", "replay", str(tmp_path / "two"), "--iter", "14"]
    done = subprocess.run(replay, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "equal metrics.json to the bit" in done.stdout
    report = json.loads((tmp_path / "two" / "replay_14" / "report.json").read_text())
    assert report["ranks"] == 2
    assert report["checkpoint"] == "model_0000009.pth"
