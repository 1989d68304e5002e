"""``hookline train``, ``eval`` and ``predict``, and what they share."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hookline.cli import main

TINY = ("--config-file", "synthetic/mlp.yaml", "MODEL.DEVICE", "cpu", "SOLVER.MAX_ITER", "6", "OUTPUT_DIR", "out")
TINY += ("LOG.WRITERS", '["JSONWriter"]')


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def refused(capsys, *words):
    """The error of a command line that changes nothing."""
    before = sorted(os.listdir("."))
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert sorted(os.listdir(".")) == before
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


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
    assert main(["inspect", "out", "small.pth"]) == 0
    assert "equal, bit for bit" in capsys.readouterr().out
    assert "Usage" not in refused(capsys, "eval", *TINY, "MODEL.WEIGHTS", "missing.pth")


TRAINER = """
from hookline.engine import DefaultTrainer
from torch import nn

class Trainer(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg):
        return nn.Linear(8, 4)

class Other:
    pass
"""


def test_a_trainer_of_ones_own(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_trainer.py").write_text(TRAINER)
    assert main(["train", "--trainer", "own_trainer:Trainer", *TINY]) == 0
    main(["inspect", "out"])
    assert "elements: 36" in capsys.readouterr().out
    assert "own_trainer" in refused(capsys, "train", "--trainer", "own_trainer:Trayner", *TINY)
    assert "--trainer: own_trainer:Other is no subclass of DefaultTrainer" in refused(
        capsys, "train", "--trainer", "own_trainer:Other", *TINY
    )
    assert "no_such_module" in refused(capsys, "train", "--trainer", "no_such_module:Trainer", *TINY)


def test_mistakes_end_with_one_line(capsys):
    assert "MODEL.NAME: is not set" in refused(capsys, "train")
    assert "did you mean 'SOLVER.BASE_LR'" in refused(capsys, "train", *TINY, "SOLVER.BASE_RL", "1")
    assert "MODEL.WEIGHTS: is not set; give the weights to evaluate" in refused(capsys, "eval", *TINY)
    assert "did you mean 'digits/mlp.yaml'" in refused(capsys, "train", "--config-file", "digits/mpl.yaml")
    assert "unrecognized arguments: --eval-only; that is the command hookline eval" in refused(
        capsys, "train", *TINY, "--eval-only"
    )
    assert "missing" in refused(capsys, "inspect", "missing")
    assert "--dtype" in refused(capsys, "export", "--checkpoint", "x", "--output", "a.pt2", "--dtype", "float16")


# Replaces torch by a module that is slow to import.
SLOW_IMPORT = "import os, time\nopen(f'importing', 'w').close()\ntime.sleep(60)\n"


@pytest.mark.parametrize(("name", "expected"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_signal_during_the_imports_has_its_exit_code(tmp_path, name, expected):
    (tmp_path / "torch.py").write_text(SLOW_IMPORT)
    command = [sys.executable, "-m", "hookline", "train", *TINY]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "importing").exists():
            time.sleep(0.02)
        process.send_signal(getattr(signal, name))
        err = process.communicate()[1]
    assert (process.returncode, err) == (expected, "")


@pytest.mark.slow
def test_several_processes_are_started():
    command = [sys.executable, "-m", "hookline", "train", *TINY, "--num-gpus", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path("out/log.txt.rank1").exists()
    assert json.loads(Path("out/metrics.json").read_text().splitlines()[-1])["synthetic/accuracy"] > 0
