"""What a run shows at its start and its end."""

import logging
import re

import pytest
import torch
from torch import nn

from hookline import Trainer
from hookline.hooks import CallbackHook


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.fc(x))


def make(folder, **options):
    data = torch.randn(12, 2), torch.arange(12) % 2
    given = {"loss": nn.CrossEntropyLoss(), "metrics": ["Accuracy"], "lr": 0.1, "length": 6, "batch_size": 4, "seed": 1}
    return Trainer(Net, data, data, output_dir=folder, **given | options)


@pytest.fixture(autouse=True)
def no_console(monkeypatch):
    monkeypatch.setattr(logging.getLogger("hookline"), "handlers", [])


def test_the_start_shows_data_hooks_and_model_and_the_end_the_best(tmp_path):
    trainer = make(tmp_path / "run", config={"CHECKPOINT.BEST.METRIC": "test/accuracy"})
    trainer.train()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "Data: ArrayDataset (12 samples), 3 iterations an epoch; tested on test\n" in log
    assert "Hooks: IterationTimer, SignalHandler, LRScheduler, " in log
    assert re.search(r"Layers:\n +layer +type +parameters", log)
    assert re.search(r"\n  fc +Linear +6\n", log)
    assert re.search(rf"Best test/accuracy: [\d.]+ at iteration 6, in {tmp_path}/run/model_best.pth", log)
    trainer.max_iter = 12
    trainer.register_hooks([CallbackHook(after_step=lambda trainer: trainer.request_stop("enough"))])
    trainer.train()
    assert "To resume: the same script with trainer.train(resume=True)" in (tmp_path / "run" / "log.txt").read_text()
    assert (tmp_path / "run" / "log.txt").read_text().count("Model: ") == 1  # only at the first start


def test_each_log_has_only_its_own_run(tmp_path):
    first = make(tmp_path / "first")
    first.train()
    make(tmp_path / "second").train()
    first.max_iter = 12
    first.train()
    logs = [(tmp_path / name / "log.txt").read_text() for name in ("first", "second")]
    assert [log.count("Training ended at iteration 6: ") for log in logs] == [1, 1]
    assert ["Training ended at iteration 12: " in log for log in logs] == [True, False]


def test_a_start_is_at_most_fifteen_lines_on_the_console(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()  # the console, which no other test here needs
    make(tmp_path / "run", config={"LOG": {"PERIOD": 1}}).train()
    shown = capsys.readouterr().out
    assert 5 < len(shown.partition("iter: 0/6")[0].splitlines()) <= 15
