"""The commands that need no trained run, and one that makes one. Mistakes are in promises/test_wrong_commands.py."""

import csv
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from ranks import HOOKLINE, complete
from run_folders import make_run
from small_runs import config_trainer

from hookline.cli.explain import key_comments
from hookline.config import get_cfg

# ---------------------------------------------------------------------- config


def test_every_key_has_a_comment():
    comments = key_comments()
    assert [key for key in get_cfg().flatten() if key not in comments] == []


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ([], ["MODEL ..."]),
        (["SOLVER.CHECKPOINT_PERIOD"], ["  Period of checkpoints: a duration.", "  default: 5000"]),
        (["solver.nonfinite_loss"], ['  type: "raise", "skip", "stop"']),
        (["SOLVER.WEIGHT_DECAY_NORM"], ["  type: float, at least 0 or None"]),
        (["SOLVER.CLIP_GRADIENTS"], ['SOLVER.CLIP_GRADIENTS.CLIP_TYPE "value"']),
        (["TEST.METRICS"], ["    Accuracy: "]),
        (["EMA"], ["EMA: hook", "  decay: float = 0.999", "  Args:"]),
    ],
)
def test_config_explains_a_key_a_section_and_a_component(command, name, lines):
    code, out, _ = command("config", "explain", *name)
    assert (code, [line for line in lines if f"\n{line}" not in f"\n{out}"]) == (0, [])


def test_config_compares_files_and_runs(command):
    Path("a.yaml").write_text("SEED: 1\nHOOKS: [EMA]\n")
    Path("run").mkdir()
    cfg = get_cfg()
    cfg.SEED, cfg.MY_OWN = 2, "x"
    Path("run/config.yaml").write_text(cfg.dump())
    difference = "SEED: 1 → 2\nHOOKS: ['EMA'] → []\nMY_OWN: (not set) → \"x\"\n"
    assert command("config", "diff", "a.yaml", "run") == (0, difference, "")
    assert command("config", "diff", "a.yaml", "a.yaml")[1] == "The configs are equal.\n"


def test_config_checks_a_file_and_writes_nothing(command, tmp_path):
    assert command("config", "check", "synthetic/mlp.yaml") == (0, "synthetic/mlp.yaml: valid\n", "")
    assert list(tmp_path.iterdir()) == []
    assert "did you mean" not in command("config", "check", "nothing.yaml")[2]


# ---------------------------------------------------------------------- find-lr, find-batch-size

FIND = (
    *("MODEL.NAME", "MLP", "MODEL.ARGS", '{"in_features": 8, "num_classes": 4}', "MODEL.LOSS.NAME", "CrossEntropyLoss"),
    *("DATASETS.TRAIN", "('synthetic',)", "DATALOADER.BATCH_SIZE", "100", "MODEL.DEVICE", "cpu", "SEED", "1"),
)


def test_a_rate_and_the_largest_batch_are_suggested_and_nothing_is_written(command, tmp_path, monkeypatch):
    code, out, _ = command("find-lr", "--num-iter", "40", *FIND)
    assert code == 0
    assert re.search(r"\nSuggestion: SOLVER.BASE_LR \d", out)
    assert len(re.findall(r"^ +[\d.e-]+ +[\d.]+ +[\d.]+$", out, re.MULTILINE)) >= 15
    monkeypatch.setattr("hookline.engine.DefaultTrainer.device_type", "cuda")
    code, out, _ = command("find-batch-size", "--max-size", "300", *FIND)
    assert (code, out.splitlines()[-1]) == (0, "DATALOADER.BATCH_SIZE 300")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- new

PROJECT = ["config.yaml", "data.py", "hook.py", "model.py", "test_project.py"]


def test_new_writes_five_files_and_shows_the_next_commands(command):
    Path("cloned/.git").mkdir(parents=True)
    Path("cloned/README.md").write_text("mine")
    for folder in ("my_project", "deeper/my-project", "cloned", "a name with spaces"):
        before = os.listdir(folder) if os.path.isdir(folder) else []
        code, out, _ = command("new", folder)
        assert code == 0
        assert sorted(os.listdir(folder)) == sorted([*before, *PROJECT])
        assert f"  cd {shlex.quote(folder)}\n" in out


# ---------------------------------------------------------------------- plot, compare


def test_runs_are_plotted_and_compared(command):
    pytest.importorskip("matplotlib")
    for name, rate in (("a", 0.1), ("b", 0.2)):
        make_run(Path("sweep", name), config={"SOLVER": {"BASE_LR": rate}})
    assert command("plot", "sweep/a", "--log") == (0, "Wrote sweep/a/curves.png\n", "")
    assert Path("sweep/a/curves.png").read_bytes().startswith(b"\x89PNG")
    plot = ("plot", "sweep", "--out", "two.svg", "--metrics", "loss", "*/accuracy")
    assert command(*plot) == (0, "Wrote two.svg\n", "")
    assert "<svg" in Path("two.svg").read_text()
    code, out, _ = command("compare", "sweep", "--format", "csv", "--sort", "loss")
    assert code == 0
    found = [(row["run"], row["SOLVER.BASE_LR"], row["test/accuracy best"]) for row in csv.DictReader(io.StringIO(out))]
    assert found == [("a", "0.1", "0.75"), ("b", "0.2", "0.75")]


# ---------------------------------------------------------------------- train, eval, predict, replay, samples

TINY = ("--config-file", "synthetic/mlp.yaml", "MODEL.DEVICE", "cpu", "SOLVER.MAX_ITER", "6", "OUTPUT_DIR", "out")
TINY += ("LOG.WRITERS", '["JSONWriter"]')


def test_train_evaluate_and_predict(command):
    code, out, _ = command("train", *TINY)
    assert code == 0
    assert "Config file: " in out
    row = json.loads(Path("out/metrics.json").read_text().splitlines()[-1])
    assert f"{row['synthetic/accuracy']:.5g}" in command("eval", *TINY, "--resume")[1]
    assert "predictions.jsonl: 256 samples" in command("predict", *TINY, "MODEL.WEIGHTS", "out/model_final.pth")[1]


TRAINER = """
from hookline.engine import DefaultTrainer
from torch import nn

class Trainer(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg):
        return nn.Linear(8, 4)
"""


def test_a_trainer_of_ones_own(command, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_trainer.py").write_text(TRAINER)
    assert command("train", "--trainer", "own_trainer:Trainer", *TINY)[0] == 0
    assert "elements: 36" in command("inspect", "out")[1]


def test_replay_and_samples_print_the_step_and_its_samples(command, tmp_path):
    config_trainer(
        tmp_path / "run",
        *("LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 1, "LOG.PROGRESS_BAR", False, "SOLVER.MAX_ITER", 10),
        *("DATASETS.TEST", []),
    ).train()
    code, out, _ = command("replay", "run", "--iter", "8", "--set", "LOG.PERIOD", "1")
    assert code == 0
    assert "from checkpoint model_0000006.pth" in out
    assert "equal metrics.json to the bit" in out
    report = json.loads(Path("run/replay_8/report.json").read_text())
    samples = [str(sample["index"]) for sample in report["samples"]]
    assert command("samples", "run", "--iter", "8")[1].split() == samples


@pytest.mark.slow
def test_a_run_of_two_ranks_is_replayed_with_two(tmp_path):
    options = ("OUTPUT_DIR", "out", "SOLVER.CHECKPOINT_PERIOD", "3", "LOG.PERIOD", "1")
    for words in (("train", *TINY, *options, "--num-gpus", 2), ("replay", "out", "--iter", 4)):
        output = complete([sys.executable, HOOKLINE, *words], tmp_path)
    assert "equal metrics.json to the bit" in output
    assert (tmp_path / "out/log.txt.rank1").exists()
    report = json.loads((tmp_path / "out/replay_4/report.json").read_text())
    assert (report["ranks"], report["checkpoint"]) == (2, "model_0000002.pth")
