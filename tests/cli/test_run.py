"""``hookline train``, ``eval`` and ``predict``, and what they share."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hookline.cli import main

TINY = ("--config-file", "synthetic/mlp.yaml", "MODEL.DEVICE", "cpu", "SOLVER.MAX_ITER", "6", "OUTPUT_DIR", "out")
TINY += ("LOG.WRITERS", '["JSONWriter"]')


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_train_evaluate_and_predict(capsys):
    assert main(["train", *TINY]) == 0
    row = json.loads(Path("out/metrics.json").read_text().splitlines()[-1])
    assert "Config file: " in capsys.readouterr().out
    assert main(["eval", *TINY, "--resume"]) == 0
    assert f"{row['synthetic/accuracy']:.5g}" in capsys.readouterr().out
    assert main(["predict", *TINY, "MODEL.WEIGHTS", "out/model_final.pth"]) == 0
    assert "predictions.jsonl: 256 samples" in capsys.readouterr().out
    assert main(["inspect", "out"]) == 0
    assert "iteration: 5" in capsys.readouterr().out
    assert main(["export", "--checkpoint", "out", "--output", "small.pth"]) == 0
    assert main(["inspect", "small.pth"]) == 0
    assert "small.pth: undamaged" in capsys.readouterr().out


TRAINER = """
from hookline.engine import DefaultTrainer
from torch import nn

class Trainer(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg):
        return nn.Linear(8, 4)
"""


def test_a_trainer_of_ones_own(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_trainer.py").write_text(TRAINER)
    assert main(["train", "--trainer", "own_trainer:Trainer", *TINY]) == 0
    main(["inspect", "out"])
    assert "elements: 36" in capsys.readouterr().out


@pytest.mark.slow
def test_several_processes_are_started():
    command = [sys.executable, "-m", "hookline", "train", *TINY, "--num-gpus", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path("out/log.txt.rank1").exists()
    assert json.loads(Path("out/metrics.json").read_text().splitlines()[-1])["synthetic/accuracy"] > 0
