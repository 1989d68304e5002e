import gc
import json
import os
import weakref

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer, TrainerBase
from hookline.hooks import HOOK_REGISTRY, HookBase, PeriodicWriter
from hookline.hooks.watching.profiling import (
    AutogradProfiler,
    GarbageCollection,
    MemoryMonitor,
    TorchMemoryStats,
    TorchProfiler,
)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch):
        return {"loss": self.linear(batch).square().mean()}


def train(steps, *hooks, start=0, device="cpu"):
    model = Net().to(device)
    trainer = SimpleTrainer(model, [torch.randn(4, 8, device=device)], torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks(hooks)
    trainer.train(start, steps)
    return trainer


def operators(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


# ---------------------------------------------------------------------------- profilers


@pytest.mark.parametrize("start", [0, 100])
def test_each_profiled_step_has_a_file_named_after_its_iteration(tmp_path, start):
    hook = TorchProfiler(lambda trainer: 2 <= trainer.iter % 100 < 4, str(tmp_path), save_tensorboard=False)
    train(start + 6, hook, start=start)
    assert sorted(os.listdir(tmp_path)) == [f"profiler-trace-iter{start + i}.json" for i in (2, 3)]
    assert "aten::addmm" in operators(tmp_path / f"profiler-trace-iter{start + 2}.json")


def test_steps_are_counted_from_the_start_of_the_run(tmp_path):
    train(105, TorchProfiler(start=1, steps=2, output_dir=str(tmp_path), save_tensorboard=False), start=100)
    assert sorted(os.listdir(tmp_path)) == ["profiler-trace-iter101.json", "profiler-trace-iter102.json"]


def test_a_trace_for_tensorboard_is_a_folder(tmp_path):
    train(2, TorchProfiler(lambda trainer: trainer.iter == 1, str(tmp_path)))
    (folder,) = tmp_path.iterdir()
    (trace,) = folder.iterdir()
    assert folder.name == "profiler-tensorboard-iter1"
    assert trace.name.startswith("worker0.")
    assert trace.name.endswith(".pt.trace.json")
    assert "aten::addmm" in operators(trace)


def test_the_autograd_profiler_writes_its_operators(tmp_path):
    train(3, AutogradProfiler(lambda trainer: trainer.iter == 1, str(tmp_path), use_cuda=False))
    assert os.listdir(tmp_path) == ["autograd-trace-iter1.json"]
    names = {event["name"] for event in json.loads((tmp_path / "autograd-trace-iter1.json").read_text())["traceEvents"]}
    assert "aten::addmm" in names


def test_both_can_be_named_in_a_config(tmp_path):
    offered = {"output_dir": str(tmp_path)}
    args = {"start": 1, "steps": 1}
    names = ("TorchProfiler", "AutogradProfiler")
    hooks = [HOOK_REGISTRY.build(name, args, offered=offered, key="HOOKS[0].ARGS") for name in names]
    train(2, hooks[0])
    train(2, hooks[1])
    assert sorted(os.listdir(tmp_path)) == ["autograd-trace-iter1.json", "profiler-tensorboard-iter1"]


@pytest.mark.parametrize("hook", [TorchProfiler, AutogradProfiler])
def test_a_predicate_with_a_start_is_an_error(hook):
    with pytest.raises(ConfigError, match="enable_predicate, or start and steps, not both"):
        hook(lambda trainer: True, ".", start=3)


def test_activities_can_be_given_by_name(tmp_path):
    hook = TorchProfiler(output_dir=str(tmp_path), activities=["cpu"], start=0, steps=1, save_tensorboard=False)
    train(1, hook)
    assert os.listdir(tmp_path) == ["profiler-trace-iter0.json"]
    with pytest.raises(ConfigError, match="no activity 'gpu'; there are cpu, "):
        TorchProfiler(activities=["gpu"])


def test_a_step_that_fails_leaves_no_profiler_running(tmp_path):
    class Failing(HookBase):
        def after_backward(self):
            raise ValueError("here")

    hook = TorchProfiler(output_dir=str(tmp_path), start=0, steps=5, save_tensorboard=False)
    with pytest.raises(ValueError, match="here"):
        train(5, hook, Failing())
    assert not torch.autograd._profiler_enabled()
    assert os.listdir(tmp_path) == []
    train(1, hook)
    assert os.listdir(tmp_path) == ["profiler-trace-iter0.json"]


@pytest.mark.gpu
@gpu
def test_kernels_are_in_the_trace(tmp_path):
    train(3, TorchProfiler(output_dir=str(tmp_path), start=2, steps=1, save_tensorboard=False), device="cuda")
    train(3, AutogradProfiler(output_dir=str(tmp_path), start=2, steps=1), device="cuda")
    assert any("gemm" in str(name) for name in operators(tmp_path / "profiler-trace-iter2.json"))
    assert (tmp_path / "autograd-trace-iter2.json").stat().st_size > 0


# ---------------------------------------------------------------------------- memory


def test_the_memory_of_the_process_is_put_when_metrics_are_written():
    trainer = train(20, MemoryMonitor(), PeriodicWriter([], 10))
    values = trainer.storage.history("rss_mem").values()
    assert [iteration for _, iteration in values] == [9, 19]
    assert all(50 < megabytes < 100_000 for megabytes, _ in values)


def test_allocated_memory_is_included(tmp_path):
    class Hoarder(HookBase):
        def after_step(self):
            if self.trainer.iter == 15:
                self.kept = torch.ones(2**26)  # 256 MiB

    hook = Hoarder()
    before, after = train(20, hook, MemoryMonitor(), PeriodicWriter([], 10)).storage.history("rss_mem").values()
    assert after[0] - before[0] == pytest.approx(256, abs=30)


@pytest.mark.gpu
@gpu
def test_the_memory_of_the_gpu_is_put():
    trainer = train(20, MemoryMonitor(), PeriodicWriter([], 10), device="cuda")
    assert trainer.storage.latest()["max_mem"][0] == torch.cuda.max_memory_allocated() / 2**20
    assert trainer.storage.latest()["reserved_mem"][0] >= 2


def test_memory_statistics_without_a_gpu_do_nothing(log, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train(50, TorchMemoryStats(period=10))
    assert log.text.count("there is no CUDA device") == 1
    assert "GPU memory" not in log.text


@pytest.mark.gpu
@gpu
def test_memory_statistics_are_logged_at_most_max_runs_times(log):
    train(100, TorchMemoryStats(period=10, max_runs=3), device="cuda")
    assert log.text.count("GPU memory at iteration") == 3
    assert "GPU memory at iteration 29" in log.text
    assert log.text.count("PyTorch CUDA memory summary") == 1


# ---------------------------------------------------------------------------- garbage


class Cycles(TrainerBase):
    """Leaves an object behind at each step that only the garbage collector can remove."""

    def __init__(self):
        super().__init__()
        self.left = []
        self.alive = []

    def run_step(self):
        class Node:
            pass

        node = Node()
        node.itself = node
        self.left.append(weakref.ref(node))
        self.alive.append(sum(ref() is not None for ref in self.left))


@pytest.fixture
def collector():
    """Puts the collector's settings back, and checks that the test left them as they were."""
    gc.unfreeze()
    before = gc.isenabled()
    yield
    after = gc.isenabled(), gc.get_freeze_count()
    gc.unfreeze()
    gc.enable()
    assert after == (before, 0)


def test_garbage_is_collected_between_steps_at_each_period(collector):
    trainer = Cycles()
    trainer.register_hooks([GarbageCollection(period=10)])
    trainer.train(0, 30)
    assert trainer.alive == [*range(1, 11)] * 3


def test_objects_that_exist_at_the_start_are_frozen_during_the_run(collector):
    seen = []

    class Look(HookBase):
        def after_step(self):
            seen.append((gc.isenabled(), gc.get_freeze_count() > 1000))

    trainer = Cycles()
    trainer.register_hooks([GarbageCollection(), Look()])
    trainer.train(0, 2)
    assert seen == [(False, True)] * 2


def test_freeze_false_freezes_nothing(collector):
    trainer = Cycles()
    trainer.register_hooks([GarbageCollection(freeze=False), look := Frozen()])
    trainer.train(0, 1)
    assert look.count == 0


class Frozen(HookBase):
    def after_step(self):
        self.count = gc.get_freeze_count()


def test_the_collector_is_restored_after_an_error(collector):
    class Failing(TrainerBase):
        def run_step(self):
            raise ValueError("here")

    trainer = Failing()
    trainer.register_hooks([GarbageCollection()])
    with pytest.raises(ValueError, match="here"):
        trainer.train(0, 1)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_disabled_collector_stays_disabled_and_frozen_objects_stay_frozen():
    gc.disable()
    gc.freeze()
    try:
        trainer = Cycles()
        trainer.register_hooks([GarbageCollection()])
        trainer.train(0, 1)
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()


def test_old_garbage_is_collected(collector):
    class Keeper(Cycles):
        kept = None

        def run_step(self):
            if self.iter == 0:
                super().run_step()
                self.kept = self.left[0]()
            if self.iter == 5:  # by now it is too old for the small collections
                self.kept = None

    trainer = Keeper()
    trainer.register_hooks([GarbageCollection(period=1)])
    trainer.train(0, 8)
    assert trainer.left[0]() is not None
    trainer.train(0, 1)  # starting again collects everything
    trainer = Keeper()
    trainer.register_hooks([GarbageCollection(period=1)])
    trainer.train(0, 12)
    assert trainer.left[0]() is None
