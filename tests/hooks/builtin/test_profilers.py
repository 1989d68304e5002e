import json
import os
import re

import pytest
import torch
from small_runs import train_net
from torch import nn

from hookline import Trainer
from hookline.hooks import AutogradProfiler, SamplePredictions, TorchProfiler


def operators(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


NAMES = ["profiler-trace-iter102.json", "profiler-trace-iter103.json"]


@pytest.mark.parametrize(
    "when", [{"enable_predicate": lambda trainer: 102 <= trainer.iter < 104}, {"start": 2, "steps": 2}]
)
def test_each_profiled_step_has_a_file_named_after_its_iteration(tmp_path, when):
    """Steps are counted from the start of the run."""
    train_net(106, TorchProfiler(**when, output_dir=str(tmp_path), save_tensorboard=False), start=100)
    assert sorted(os.listdir(tmp_path)) == NAMES
    assert "aten::addmm" in operators(tmp_path / NAMES[0])


def test_hooks_named_or_passed_write_into_the_folder_of_the_run(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    monkeypatch.chdir(tmp_path)
    data = torch.rand(8, 1, 4, 4), torch.arange(8) % 2
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    hooks = [SamplePredictions(num=2), TorchProfiler(start=0, steps=1), AutogradProfiler(start=1, steps=1)]
    hooks += [{"NAME": "TorchProfiler", "ARGS": {"start": 2, "steps": 1}}]
    hooks += [{"NAME": "AutogradProfiler", "ARGS": {"start": 3, "steps": 1}}]
    options = {"loss": nn.CrossEntropyLoss(), "hooks": hooks, "batch_size": 4, "length": 4, "output_dir": "run"}
    Trainer(model, data, data, **options).train()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (tmp_path / "run/samples/iter_0000004.png").exists()
    traces = [next((tmp_path / f"run/profiler-tensorboard-iter{step}").iterdir()) for step in (0, 2)]
    assert all(re.fullmatch(r"worker0\..*\.pt\.trace\.json", trace.name) for trace in traces)
    traces += [tmp_path / f"run/autograd-trace-iter{step}.json" for step in (1, 3)]
    assert all("aten::addmm" in operators(trace) for trace in traces)
