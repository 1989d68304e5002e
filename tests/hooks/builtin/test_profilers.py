import json
import os
import re

import pytest
from small_runs import train_net

from hookline.hooks import HOOK_REGISTRY, TorchProfiler


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


@pytest.mark.parametrize("name", ["TorchProfiler", "AutogradProfiler"])
def test_both_can_be_named_in_a_config(tmp_path, name):
    offered, args = {"output_dir": str(tmp_path)}, {"start": 1, "steps": 1}
    train_net(2, HOOK_REGISTRY.build(name, args, offered=offered, key="HOOKS[0].NAME"))
    [trace] = tmp_path.iterdir()
    if name == "TorchProfiler":  # for TensorBoard: a folder
        assert trace.name == "profiler-tensorboard-iter1"
        [trace] = trace.iterdir()
        assert re.fullmatch(r"worker0\..*\.pt\.trace\.json", trace.name)
    else:
        assert trace.name == "autograd-trace-iter1.json"
    assert "aten::addmm" in operators(trace)
