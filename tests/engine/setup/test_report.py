"""What a run shows at its start and its end."""

import argparse
import logging
import re

import pytest
import torch
from torch import nn

from hookline import Trainer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.fc(x))


def make(folder, **options):
    torch.manual_seed(0)
    data = torch.randn(12, 2), torch.arange(12) % 2
    given = {"loss": nn.CrossEntropyLoss(), "metrics": ["Accuracy"], "lr": 0.1, "length": 6, "batch_size": 4, "seed": 1}
    return Trainer(Net, data, data, output_dir=folder, **given | options)


@pytest.fixture(autouse=True)
def no_console(monkeypatch):
    monkeypatch.setattr(logging.getLogger("hookline"), "handlers", [])


def test_the_start_shows_data_hooks_and_the_model(tmp_path):
    make(tmp_path / "run").train()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(
        r"Data: .*ArrayDataset>? \(12 samples\), 3 iterations an epoch; tested on test \(12 samples\)\n", log
    )
    assert "Hooks: IterationTimer, SignalHandler, LRScheduler, " in log
    assert re.search(r"Model:\n +layer +type +parameters", log)
    assert re.search(r"\n  fc +Linear +6\n", log)


def test_a_session_ends_with_calls(tmp_path):
    trainer = make(tmp_path / "run")
    trainer.train()
    log = (tmp_path / "run" / "log.txt").read_text()
    end = log[log.index("Next:") :].splitlines()[1:]
    assert [line.split(":")[0].strip() for line in end] == ["train longer", "evaluate"]
    assert end[0].split(": ")[1].strip() == "trainer.max_iter = 12; trainer.train()"
    exec(end[0].split(": ")[1].strip(), {"trainer": trainer})
    assert trainer.finished_iter == 11
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("Model:\n") == 1  # only at the first start


def test_the_best_checkpoint_is_named(tmp_path):
    make(tmp_path / "run", config={"CHECKPOINT.BEST.METRIC": "test/accuracy"}).train()
    assert re.search(
        rf"Best test/accuracy: [\d.]+ at iteration 6, in {tmp_path}/run/model_best.pth",
        (tmp_path / "run" / "log.txt").read_text(),
    )


@pytest.mark.parametrize("words", [{"trainer": ""}, {}])
def test_a_command_ends_with_two_lines_of_text(tmp_path, words):
    trainer = make(tmp_path / "a run")
    trainer._start.args = argparse.Namespace(opts=[], resume=False, **words)
    trainer.train()
    log = (tmp_path / "a run" / "log.txt").read_text()
    longer, evaluate = log[log.index("Next:") :].splitlines()[1:3]
    assert longer == "  train longer: the same command with --resume SOLVER.MAX_ITER 12"
    weights = f"MODEL.WEIGHTS '{tmp_path}/a run/model_final.pth'"
    if words:
        assert evaluate == f"  evaluate:     hookline eval --config-file '{tmp_path}/a run/config.yaml' {weights}"
    else:
        assert evaluate == f"  evaluate:     the same command with --eval-only {weights}"


def test_each_log_has_only_its_own_run(tmp_path):
    first, second = make(tmp_path / "first"), None
    first.train()
    first.evaluate()
    second = make(tmp_path / "second")
    second.train()
    first.max_iter = 12
    first.train()
    logs = [(tmp_path / name / "log.txt").read_text() for name in ("first", "second")]
    assert [log.count("Training ended at iteration 6: ") for log in logs] == [1, 1]
    assert ["Training ended at iteration 12: " in log for log in logs] == [True, False]
