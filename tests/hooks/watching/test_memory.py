import pickle

import pytest
import torch
from small_runs import train_net

from hookline.hooks import HookBase, MemoryMonitor, MemorySnapshot, PeriodicWriter, TorchMemoryStats

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_the_memory_of_the_process_is_put_when_metrics_are_written():
    trainer = train_net(20, MemoryMonitor(), PeriodicWriter([], 10))
    values = trainer.storage.history("rss_mem").values()
    assert [iteration for _, iteration in values] == [9, 19]
    assert all(50 < megabytes < 100_000 for megabytes, _ in values)


def test_allocated_memory_is_included(tmp_path):
    class Hoarder(HookBase):
        def after_step(self):
            if self.trainer.iter == 15:
                self.kept = torch.ones(2**26)  # 256 MiB

    hook = Hoarder()
    before, after = train_net(20, hook, MemoryMonitor(), PeriodicWriter([], 10)).storage.history("rss_mem").values()
    assert after[0] - before[0] == pytest.approx(256, abs=30)


@pytest.mark.gpu
@gpu
def test_the_memory_of_the_gpu_is_put():
    trainer = train_net(20, MemoryMonitor(), PeriodicWriter([], 10), device="cuda")
    assert trainer.storage.latest()["max_mem"][0] == torch.cuda.max_memory_allocated() / 2**20
    assert trainer.storage.latest()["reserved_mem"][0] >= 2


def test_memory_statistics_without_a_gpu_do_nothing(log, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train_net(50, TorchMemoryStats(period=10))
    assert log.text.count("there is no CUDA device") == 1
    assert "GPU memory" not in log.text


@pytest.mark.gpu
@gpu
def test_memory_statistics_are_logged_at_most_max_runs_times(log):
    train_net(100, TorchMemoryStats(period=10, max_runs=3), device="cuda")
    assert log.text.count("GPU memory at iteration") == 3
    assert "GPU memory at iteration 29" in log.text
    assert log.text.count("PyTorch CUDA memory summary") == 1


def test_a_memory_snapshot_without_a_gpu_does_nothing(log, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train_net(5, MemorySnapshot(str(tmp_path), start=1, steps=2))
    assert log.text.count("MemorySnapshot: there is no CUDA device") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@gpu
def test_a_memory_snapshot_has_the_allocations_of_its_steps(tmp_path):
    train_net(5, MemorySnapshot(str(tmp_path), start=1, steps=2), device="cuda")
    with (tmp_path / "memory_iter1.pickle").open("rb") as file:
        assert pickle.load(file)["segments"]
