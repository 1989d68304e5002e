"""``hookline find-lr`` and ``hookline find-batch-size``."""

import re

import pytest
from run_tools import run_command

CONFIG = (
    *("MODEL.NAME", "MLP", "MODEL.ARGS", '{"in_features": 8, "num_classes": 4}', "MODEL.LOSS.NAME", "CrossEntropyLoss"),
    *("DATASETS.TRAIN", "('synthetic',)", "DATALOADER.BATCH_SIZE", "100", "MODEL.DEVICE", "cpu", "SEED", "1"),
)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_command(arguments, capsys)


def test_a_rate_is_suggested_and_nothing_is_written(command, tmp_path):
    code, out, _ = command("find-lr", "--num-iter", "40", *CONFIG)
    assert code == 0
    assert re.search(r"\nSuggestion: SOLVER.BASE_LR \d", out)
    assert len(re.findall(r"^ +[\d.e-]+ +[\d.]+ +[\d.]+$", out, re.MULTILINE)) >= 15
    assert not list(tmp_path.iterdir())


def test_the_largest_batch_is_printed(command, tmp_path, monkeypatch):
    monkeypatch.setattr("hookline.engine.DefaultTrainer._device_type", lambda self: "cuda")
    code, out, _ = command("find-batch-size", "--max-size", "300", *CONFIG)
    assert (code, out.splitlines()[-1]) == (0, "DATALOADER.BATCH_SIZE 300")
    assert not list(tmp_path.iterdir())
