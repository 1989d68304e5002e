import pickle

import pytest
import torch
from small_runs import train_net

from hookline.hooks import CallbackHook, MemoryMonitor, MemorySnapshot, PeriodicWriter, TorchMemoryStats

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_the_memory_of_the_process_is_put_when_metrics_are_written():
    kept = []
    hoard = CallbackHook(after_step=lambda t: t.iter == 15 and kept.append(torch.ones(2**26)))  # 256 MiB
    trainer = train_net(20, hoard, MemoryMonitor(), PeriodicWriter([], 10))
    (before, first), (after, second) = trainer.storage.history("rss_mem").values()
    assert (first, second) == (9, 19)
    assert 50 < before < 100_000
    assert after - before == pytest.approx(256, abs=30)


@pytest.mark.gpu
@gpu
def test_the_memory_of_the_gpu_is_put():
    trainer = train_net(20, MemoryMonitor(), PeriodicWriter([], 10), device="cuda")
    assert trainer.storage.latest()["max_mem"][0] == torch.cuda.max_memory_allocated() / 2**20
    assert trainer.storage.latest()["reserved_mem"][0] >= 2


def test_without_a_gpu_there_is_one_warning_each(log, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train_net(20, TorchMemoryStats(period=10), MemorySnapshot(str(tmp_path), start=1, steps=2))
    assert log.text.count("there is no CUDA device") == 2
    assert "GPU memory" not in log.text
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@gpu
def test_a_memory_snapshot_has_the_allocations_of_its_steps(tmp_path):
    train_net(5, MemorySnapshot(str(tmp_path), start=1, steps=2), device="cuda")
    with (tmp_path / "memory_iter1.pickle").open("rb") as file:
        assert pickle.load(file)["segments"]
