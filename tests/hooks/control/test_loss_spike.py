import json
import math

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer, TrainerBase
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import CallbackHook, JSONWriter, MemoryMonitor, PeriodicCheckpointer, PeriodicWriter
from hookline.hooks.control.loss_spike import LossSpike


def noise(iteration):
    return 2.0 + 0.1 * math.sin(7.3 * iteration)


class Losses(TrainerBase):
    """Puts a noisy loss that jumps at some iterations."""

    def __init__(self, jumps, *hooks, path=None, period=10):
        super().__init__()
        self.jumps = jumps
        writers = [JSONWriter(str(path))] if path else []
        self.register_hooks([*hooks, PeriodicWriter(writers, period)])

    def run_step(self):
        self.storage.put_scalar("total_loss", self.jumps.get(self.iter, noise(self.iter)))


def test_jumps_are_counted_and_noise_is_not():
    hook = LossSpike(window=20)
    trainer = Losses({50: 30.0, 73: 8.0}, hook)
    trainer.train(0, 100)
    assert hook.count == 2
    assert trainer.storage.latest()["loss_spikes"] == (2.0, 99)


def test_every_row_has_the_count(tmp_path):
    path = tmp_path / "metrics.json"
    Losses({50: 30.0}, LossSpike(window=20), path=path).train(0, 80)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["iteration"], row["loss_spikes"]) for row in rows] == [
        *((it, 0.0) for it in (9, 19, 29, 39, 49)),
        *((it, 1.0) for it in (59, 69, 79)),
    ]


@pytest.mark.parametrize(("hook", "metric"), [(LossSpike, "loss_spikes"), (MemoryMonitor, "rss_mem")])
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(tmp_path, hook, metric):
    def places():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [row["iteration"] for row in rows if metric in row]

    def trainer(*hooks):
        trainer = Losses({}, hook(), *hooks, path=path)
        model = nn.Linear(1, 1)
        trainer.checkpointer = Checkpointer(model, str(tmp_path), trainer=trainer)
        trainer.register_hooks([PeriodicCheckpointer(trainer.checkpointer, 0)])
        return trainer

    path = tmp_path / "metrics.json"
    stopping = CallbackHook(after_step=lambda t: t.request_stop("SIGTERM", exit_code=75) if t.iter == 33 else None)
    trainer(stopping).train(0, 50)
    assert places() == [9, 19, 29, 33]
    resumed = trainer()
    resumed.checkpointer.resume_or_load("", resume=True)
    resumed.train(resumed.iter + 1, 50)
    assert places() == [9, 19, 29, 39, 49]


def test_a_spike_is_logged_once_with_its_iteration(log):
    Losses({50: 30.0}, LossSpike(window=20)).train(0, 80)
    assert log.text.count("total_loss jumped to 30 at iteration 50;") == 1


def test_spikes_between_two_checks_are_logged_together(log):
    Losses({50: 30.0, 51: math.inf, 52: 40.0}, LossSpike(window=20)).train(0, 80)
    assert log.text.count("jumped") == 1
    assert "jumped to inf at iteration 51 (and 2 more since the last check)" in log.text


def test_the_first_spikes_do_not_hide_later_ones():
    hook = LossSpike(window=20)
    Losses(dict.fromkeys(range(50, 90, 5), 100.0), hook).train(0, 100)
    assert hook.count == 8


def test_a_loss_that_stays_high_is_the_new_normal_after_half_a_window():
    hook = LossSpike(window=20)
    Losses({iteration: 10 * noise(iteration) for iteration in range(50, 200)}, hook).train(0, 200)
    assert 10 <= hook.count <= 14


def test_rounding_of_a_constant_loss_is_not_a_spike():
    hook = LossSpike(window=20)
    Losses({iteration: 1.0 + 1e-7 * (iteration % 7 == 0) for iteration in range(100)}, hook).train(0, 100)
    assert hook.count == 0


def test_no_spikes_before_the_window_is_half_full():
    hook = LossSpike(window=20)
    Losses({3: 100.0}, hook).train(0, 50)
    assert hook.count == 0


def test_nan_is_a_spike_at_any_time():
    hook = LossSpike(window=20)
    Losses({3: math.nan, 4: math.inf, 40: math.nan}, hook).train(0, 50)
    assert hook.count == 3


def test_the_writing_period_does_not_change_the_spikes():
    counts = []
    for period in (1, 7, 1000):
        hook = LossSpike(window=20, factor=0.5)
        Losses({50: 30.0}, hook, period=period).train(0, 200)
        counts.append((hook.count, hook.state_dict()))
    assert counts[0] == counts[1] == counts[2]
    assert counts[0][0] > 1


def test_action_stop_stops_the_run():
    trainer = Losses({50: 30.0}, LossSpike(window=20, action="stop"))
    result = trainer.train(0, 100)
    assert result.iteration == 60
    assert result.reason == "total_loss jumped to 30 at iteration 50"


def test_a_spike_in_the_last_step_does_not_stop_a_complete_run():
    hook = LossSpike(window=20, action="stop")
    result = Losses({99: 30.0}, hook, period=0).train(0, 100)
    assert hook.count == 1
    assert result.iteration == 100


def make(folder, hook, losses):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, batch):
            return {"loss": losses(batch.item()) + 0.0 * self.weight}

    model = Net()
    data = [torch.tensor(float(i)) for i in range(100)]
    trainer = SimpleTrainer(model, data, torch.optim.SGD(model.parameters(), lr=0.1))
    checkpointer = Checkpointer(model, str(folder), trainer=trainer)
    trainer.register_hooks([hook, PeriodicCheckpointer(checkpointer, 45), PeriodicWriter([], 10)])
    return trainer, checkpointer


def test_action_save_saves_a_checkpoint(tmp_path):
    trainer, _ = make(tmp_path, LossSpike(window=20, action="save"), lambda i: 30.0 if i == 50 else noise(i))
    trainer.train(0, 70)
    assert (tmp_path / "model_0000059.pth").is_file()


def test_a_resumed_run_finds_the_same_spikes(tmp_path):
    def losses(i):
        return 30.0 if i in (43, 47) else noise(i)

    whole = LossSpike(window=20, factor=0.5)
    make(tmp_path / "whole", whole, losses)[0].train(0, 80)
    make(tmp_path / "cut", LossSpike(window=20, factor=0.5), losses)[0].train(0, 45)  # last written at 40
    resumed = LossSpike(window=20, factor=0.5)
    trainer, checkpointer = make(tmp_path / "cut", resumed, lambda i: losses(i + 45))
    state = torch.load(checkpointer.get_checkpoint_file(), weights_only=True)
    resumed.load_state_dict(state["trainer"]["hooks"]["LossSpike"])
    trainer.train(45, 80)
    assert resumed.count == whole.count > 2
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize("kwargs", [{"action": "explode"}, {"window": 2}])
def test_wrong_arguments_are_rejected(kwargs):
    with pytest.raises(ConfigError, match="LossSpike"):
        LossSpike(**kwargs)
