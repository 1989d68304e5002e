import json
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from hookline.engine import SimpleTrainer, TrainerBase
from hookline.engine.data.batch_sampler import GlobalBatchSampler
from hookline.engine.evaluation import evaluation_context, inference_on_dataset
from hookline.engine.modeling import ModelAdapter
from hookline.hooks import CallbackHook, EvalHook, HookBase, IterationTimer, JSONWriter, PeriodicWriter, Throughput


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, batch):
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        return {"loss": self.linear(x).square().mean()}


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def train(folder, loader, steps, *hooks, period=10, **kwargs):
    model = Loss()
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)
    trainer.register_hooks([*hooks, PeriodicWriter([JSONWriter(str(folder / "metrics.json"), period)], period)])
    trainer.train(0, steps)
    return rows(folder)


def loader(samples=40, batch_size=8, **kwargs):
    return DataLoader(TensorDataset(torch.randn(samples, 4)), batch_size=batch_size, **kwargs)


class Clock:
    """Every step takes half a second of the hook's clock."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("hookline.hooks.watching.timing.time.perf_counter", lambda: self.now)

    def hook(self):
        clock = self

        class Tick(HookBase):
            def after_step(self):
                clock.now += 0.5

        return Tick()


def test_samples_per_second_use_wall_clock_time(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    found = train(tmp_path, loader(), 20, Throughput(), clock.hook())
    assert [row["samples_per_s"] for row in found] == [16.0, 16.0]
    assert [row["iteration"] for row in found] == [9, 19]


def test_a_smaller_last_batch_is_not_counted_as_full(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    found = train(tmp_path, loader(samples=10), 10, Throughput(), clock.hook())  # batches of 8 and 2
    assert found[0]["samples_per_s"] == 10.0


def test_the_epoch_is_a_fraction(tmp_path):
    found = train(tmp_path, loader(samples=32), 10, Throughput(), period=3)  # 4 batches
    assert [row["epoch"] for row in found] == [0.75, 1.5, 2.25, 2.5]


def test_the_epoch_continues_after_a_resume(tmp_path):
    model = Loss()
    trainer = SimpleTrainer(model, loader(samples=32), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks([Throughput()])
    trainer.train(0, 6)
    trainer.train(6, 7)
    assert trainer.storage.latest()["epoch"] == (1.75, 6)


def test_without_a_batch_size_batches_are_counted(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    batches = [{"x": torch.randn(3, 4)}, {"x": torch.randn(5, 4)}]
    found = train(tmp_path, batches, 10, Throughput(), clock.hook())
    assert found[0]["samples_per_s"] == 8.0


def test_a_given_batch_size_is_used_and_batches_are_not_counted(tmp_path, monkeypatch):
    clock, hook = Clock(monkeypatch), Throughput(batch_size=100)
    found = train(tmp_path, [{"x": torch.randn(3, 4)}], 10, hook, clock.hook())
    assert found[0]["samples_per_s"] == 200.0
    assert "after_fetch" not in hook.__dict__


@pytest.mark.parametrize("items_of", ["x", lambda batch: batch["x"].numel()])
def test_items_are_counted_in_each_batch(tmp_path, monkeypatch, items_of):
    clock = Clock(monkeypatch)
    found = train(tmp_path, [{"x": torch.randn(3, 4)}], 10, Throughput(items_of=items_of), clock.hook())
    assert found[0]["items_per_s"] == 24.0
    assert found[0]["samples_per_s"] == 6.0


def test_items_are_read_from_the_storage(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)

    class Tokens(HookBase):
        def after_step(self):
            self.trainer.storage.put_scalar("num_items", 100 + self.trainer.iter, smoothing_hint=False)

    found = train(tmp_path, loader(), 20, Throughput(), Tokens(), clock.hook())
    assert [row["items_per_s"] for row in found] == [2 * 104.5, 2 * 114.5]


def test_the_slowest_steps_are_reported(tmp_path):
    class Step(TrainerBase):
        def run_step(self):
            if self.iter == 30:
                time.sleep(0.05)

    trainer = Step()
    path = str(tmp_path / "metrics.json")
    trainer.register_hooks([IterationTimer(0), Throughput(), PeriodicWriter([JSONWriter(path)], 20)])
    trainer.train(0, 60)
    found = rows(tmp_path)
    assert [row["time_max"] > 0.05 for row in found] == [False, True, False]
    assert all(row["time_p95"] < 0.05 for row in found)


def test_each_row_has_the_speed_since_the_row_before(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)

    class Impatient(HookBase):
        def after_step(self):
            if self.trainer.iter == 12:
                self.trainer.request_write()

    found = train(tmp_path, loader(), 25, Impatient(), Throughput(), clock.hook())
    assert [row["iteration"] for row in found if "epoch" in row] == [9, 12, 19, 24]
    assert {row["samples_per_s"] for row in found} == {16.0}


def test_a_resumed_run_reports_at_the_same_iterations(tmp_path):
    def run(folder, start, end):
        model = Loss()
        trainer = SimpleTrainer(model, loader(), torch.optim.SGD(model.parameters(), lr=0.1))
        writer = JSONWriter(str(folder / "metrics.json"))
        stop = CallbackHook(after_step=lambda t: t.request_stop() if t.iter + 1 == end else None)
        trainer.register_hooks([Throughput(), PeriodicWriter([writer], 15), stop])
        trainer.train(start, 100)

    (tmp_path / "cut").mkdir()
    run(tmp_path, 0, 100)
    run(tmp_path / "cut", 0, 37)
    run(tmp_path / "cut", 37, 100)
    whole, cut = ([(r["iteration"], "epoch" in r) for r in rows(d)] for d in (tmp_path, tmp_path / "cut"))
    assert [row for row in cut if row[0] != 36] == whole  # where the first part was stopped


def test_no_row_is_added_at_the_end(tmp_path):
    assert [row["iteration"] for row in train(tmp_path, loader(), 20, Throughput())] == [9, 19]


def test_the_hook_may_be_registered_after_the_writer(tmp_path):
    path = tmp_path / "metrics.json"
    data = TensorDataset(torch.randn(64, 4))
    model = Loss()
    trainer = SimpleTrainer(model, DataLoader(data, batch_size=16), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks([PeriodicWriter([JSONWriter(str(path))], 4), Throughput()])
    trainer.train(0, 8)
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["iteration"] == 7
    assert any("samples" in name for name in last)


@pytest.mark.parametrize(("batches", "samples"), [("of all ranks", 16), ("of each rank", 32)])
def test_the_batches_of_all_ranks_are_counted(batches, samples):
    data = TensorDataset(torch.randn(64, 4))
    sampler = GlobalBatchSampler(SequentialSampler(data), 16, rank=0, world_size=2)
    kwargs = {"batch_sampler": sampler} if batches == "of all ranks" else {"batch_size": 16}
    model = Loss()
    trainer = SimpleTrainer(model, DataLoader(data, **kwargs), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.comm = type("Two", (), {"get_data_size": staticmethod(lambda: 2)})
    hook = Throughput()
    trainer.register_hooks([hook])
    assert hook._samples_per_step() == samples


def test_accumulated_batches_are_counted_once(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    kwargs = {"accumulation_steps": 2, "adapter": ModelAdapter()}
    found = train(tmp_path, [{"x": torch.randn(8, 4)}], 10, Throughput(), clock.hook(), **kwargs)
    assert found[0]["samples_per_s"] == 16.0


def test_the_speed_of_evaluations_is_put(tmp_path):
    held_out = loader(24)

    def evaluate():
        with evaluation_context(trainer.emit):
            inference_on_dataset(trainer.model, held_out, None)

    model = Loss()
    trainer = SimpleTrainer(model, loader(), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks([EvalHook(5, evaluate), Throughput()])
    metrics = trainer.train(0, 10).metrics
    assert metrics["eval_samples_per_s"] == pytest.approx(24 / metrics["eval_time"])
    assert [iteration for _, iteration in trainer.storage.history("eval_time").values()] == [4, 10]
