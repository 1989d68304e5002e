import json
import os

import pytest
import torch
from small_runs import train_net

from hookline.config import ConfigError
from hookline.hooks import (
    HOOK_REGISTRY,
    AutogradProfiler,
    HookBase,
    TorchProfiler,
)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def operators(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


@pytest.mark.parametrize("start", [0, 100])
def test_each_profiled_step_has_a_file_named_after_its_iteration(tmp_path, start):
    hook = TorchProfiler(lambda trainer: 2 <= trainer.iter % 100 < 4, str(tmp_path), save_tensorboard=False)
    train_net(start + 6, hook, start=start)
    assert sorted(os.listdir(tmp_path)) == [f"profiler-trace-iter{start + i}.json" for i in (2, 3)]
    assert "aten::addmm" in operators(tmp_path / f"profiler-trace-iter{start + 2}.json")


def test_steps_are_counted_from_the_start_of_the_run(tmp_path):
    train_net(105, TorchProfiler(start=1, steps=2, output_dir=str(tmp_path), save_tensorboard=False), start=100)
    assert sorted(os.listdir(tmp_path)) == ["profiler-trace-iter101.json", "profiler-trace-iter102.json"]


def test_a_trace_for_tensorboard_is_a_folder(tmp_path):
    train_net(2, TorchProfiler(lambda trainer: trainer.iter == 1, str(tmp_path)))
    (folder,) = tmp_path.iterdir()
    (trace,) = folder.iterdir()
    assert folder.name == "profiler-tensorboard-iter1"
    assert trace.name.startswith("worker0.")
    assert trace.name.endswith(".pt.trace.json")
    assert "aten::addmm" in operators(trace)


def test_the_autograd_profiler_writes_its_operators(tmp_path):
    train_net(3, AutogradProfiler(lambda trainer: trainer.iter == 1, str(tmp_path), use_cuda=False))
    assert os.listdir(tmp_path) == ["autograd-trace-iter1.json"]
    names = {event["name"] for event in json.loads((tmp_path / "autograd-trace-iter1.json").read_text())["traceEvents"]}
    assert "aten::addmm" in names


def test_both_can_be_named_in_a_config(tmp_path):
    offered = {"output_dir": str(tmp_path)}
    args = {"start": 1, "steps": 1}
    names = ("TorchProfiler", "AutogradProfiler")
    hooks = [HOOK_REGISTRY.build(name, args, offered=offered, key="HOOKS[0].ARGS") for name in names]
    train_net(2, hooks[0])
    train_net(2, hooks[1])
    assert sorted(os.listdir(tmp_path)) == ["autograd-trace-iter1.json", "profiler-tensorboard-iter1"]


@pytest.mark.parametrize("hook", [TorchProfiler, AutogradProfiler])
def test_a_predicate_with_a_start_is_an_error(hook):
    with pytest.raises(ConfigError, match="enable_predicate, or start and steps, not both"):
        hook(lambda trainer: True, ".", start=3)


def test_activities_can_be_given_by_name(tmp_path):
    hook = TorchProfiler(output_dir=str(tmp_path), activities=["cpu"], start=0, steps=1, save_tensorboard=False)
    train_net(1, hook)
    assert os.listdir(tmp_path) == ["profiler-trace-iter0.json"]
    with pytest.raises(ConfigError, match="unknown activity 'gpu'; use one of cpu, "):
        TorchProfiler(activities=["gpu"])


def test_a_step_that_fails_leaves_no_profiler_running(tmp_path):
    class Failing(HookBase):
        def after_backward(self):
            raise ValueError("here")

    hook = TorchProfiler(output_dir=str(tmp_path), start=0, steps=5, save_tensorboard=False)
    with pytest.raises(ValueError, match="here"):
        train_net(5, hook, Failing())
    assert not torch.autograd._profiler_enabled()
    assert os.listdir(tmp_path) == []
    train_net(1, hook)
    assert os.listdir(tmp_path) == ["profiler-trace-iter0.json"]


@pytest.mark.gpu
@gpu
def test_kernels_are_in_the_trace(tmp_path):
    train_net(3, TorchProfiler(output_dir=str(tmp_path), start=2, steps=1, save_tensorboard=False), device="cuda")
    train_net(3, AutogradProfiler(output_dir=str(tmp_path), start=2, steps=1), device="cuda")
    assert any("gemm" in str(name) for name in operators(tmp_path / "profiler-trace-iter2.json"))
    assert (tmp_path / "autograd-trace-iter2.json").stat().st_size > 0
