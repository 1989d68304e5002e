"""What a run shows at its start and its end."""

import logging
import re

import pytest
from one_call import QUIET, Net, X, Y, one_call, points
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookline.engine import Trainer
from hookline.hooks import CallbackHook


@pytest.fixture
def make(tmp_path):
    """Make a trainer that logs as scripts do by default."""
    given = {"test": points(seed=1), "metrics": ["Accuracy"], "config": {"LOG.PERIOD": 20, "LOG.WRITERS": []}}
    return lambda folder, **options: one_call(tmp_path / folder, **{**given, **options})


@pytest.fixture
def log_of(tmp_path, monkeypatch):
    """The text of a run's log; nothing is shown on the console."""
    monkeypatch.setattr(logging.getLogger("hookline"), "handlers", [])
    return lambda folder: (tmp_path / folder / "log.txt").read_text()


def test_the_start_shows_data_hooks_and_model_and_the_end_the_best(make, log_of, tmp_path):
    trainer = make("run", monitor="test/accuracy")
    trainer.train()
    log = log_of("run")
    assert "Data: points (24 samples), 3 iterations an epoch; tested on test\n" in log
    assert "Hooks: IterationTimer, SignalHandler, LRScheduler, " in log
    assert re.search(r"Layers:\n +layer +type +parameters", log)
    assert re.search(r"\n  layers\.3 +Linear +27\n", log)
    assert re.search(rf"Best test/accuracy: [\d.]+ at iteration \d, in {tmp_path}/run/model_best.pth", log)
    trainer.max_iter = 12
    trainer.register_hooks([CallbackHook(after_step=lambda trainer: trainer.request_stop("enough"))])
    trainer.train()
    assert "To resume: the same script with trainer.train(resume=True)" in log_of("run")
    assert log_of("run").count("Model: ") == 1  # only at the first start


class OwnLoader(Trainer):
    @classmethod
    def build_train_loader(cls, cfg):
        return DataLoader(TensorDataset(X, Y), batch_size=6)


def test_the_batch_size_is_that_of_a_loader_of_ones_own(log_of, tmp_path):
    OwnLoader(Net, None, loss=nn.CrossEntropyLoss(), length=4, output_dir=tmp_path / "run", config=QUIET).train()
    assert "Training for 4 iterations (1 epochs), 6 samples each, on cpu" in log_of("run")


def test_each_log_has_only_its_own_run(make, log_of):
    first = make("first")
    first.train()
    make("second").train()
    first.max_iter = 12
    first.train()
    logs = [log_of(name) for name in ("first", "second")]
    assert [log.count("Training ended at iteration 6: ") for log in logs] == [1, 1]
    assert ["Training ended at iteration 12: " in log for log in logs] == [True, False]


def test_a_start_is_at_most_eleven_lines_on_the_console_beside_the_table_of_layers(make, capsys):
    make("run", config={"LOG": {"PERIOD": 1, "WRITERS": ["CommonMetricPrinter"]}}).train()
    shown = capsys.readouterr().out
    assert 5 < len(re.findall(r"^\d\d:", shown.partition("iter: 0/6")[0], re.MULTILINE)) <= 11
