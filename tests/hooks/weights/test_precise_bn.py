"""Batch norm statistics are recomputed, and training is not affected."""

import itertools

import numpy as np
import pytest
import torch
from small_runs import assert_equal_models, config_trainer, kill_at
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from hookline.config import ConfigError, get_cfg
from hookline.engine import SimpleTrainer
from hookline.engine.data import DATASET_REGISTRY
from hookline.hooks import CallbackHook, EvalHook, PreciseBN


class Net(nn.Module):
    def __init__(self, **norm):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, **norm)
        self.layer = nn.Linear(3, 2)

    def forward(self, batch):
        x, y = batch
        scores = self.layer(self.norm(x))
        return {"loss": F.cross_entropy(scores, y)} if self.training else scores


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, 3, generator=generator) * 3 + 5, torch.arange(6) % 2) for _ in range(count)]


def trainer_of(model, *hooks):
    trainer = SimpleTrainer(model, batches(4), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks(hooks)
    return trainer


def test_statistics_are_those_of_the_data():
    model, data = Net(), batches(10, seed=1)
    trainer_of(model, PreciseBN(0, model, data, 8)).train(0, 3)
    x = torch.cat([x for x, _ in data[:8]])
    torch.testing.assert_close(model.norm.running_mean, x.mean(0))
    torch.testing.assert_close(model.norm.running_var, x.var(0, unbiased=False))
    assert model.norm.momentum == 0.1
    assert model.norm.num_batches_tracked == 3  # only steps


def test_statistics_are_computed_before_the_evaluation_of_the_same_step():
    model, data, seen = Net(), batches(4, seed=1), []
    x = torch.cat([x for x, _ in data])
    look = EvalHook(2, lambda: seen.append(model.norm.running_mean.clone()))
    trainer = trainer_of(model, PreciseBN(2, model, lambda: data, 4), look)
    buffer = model.norm.running_mean
    trainer.train(0, 5)
    assert len(seen) == 3
    for mean in seen:
        torch.testing.assert_close(mean, x.mean(0))
    assert model.norm.running_mean is buffer


def test_a_short_loader_is_read_once_and_an_iterable_restarts():
    model = Net()
    trainer_of(model, PreciseBN(0, model, batches(3, seed=1), 200)).train(0, 2)
    torch.testing.assert_close(model.norm.running_mean, torch.cat([x for x, _ in batches(3, seed=1)]).mean(0))

    class Stream:
        def __iter__(self):
            return iter(batches(3, seed=1))

    trainer_of(model, PreciseBN(0, model, Stream(), 6)).train(0, 2)
    torch.testing.assert_close(model.norm.running_mean, torch.cat([x for x, _ in batches(3, seed=1)]).mean(0))


def test_norms_in_eval_mode_or_without_statistics_are_unchanged():
    class Two(Net):
        def __init__(self):
            super().__init__()
            self.frozen = nn.BatchNorm1d(3)
            self.untracked = nn.BatchNorm1d(3, track_running_stats=False)

        def forward(self, batch):
            return super().forward((self.untracked(self.frozen(batch[0])), batch[1]))

    model = Two()
    model.train()
    trainer = trainer_of(model, PreciseBN(0, model, batches(3), 3))
    model.frozen.eval()
    trainer.train(0, 2)
    assert torch.equal(model.frozen.running_mean, torch.zeros(3))
    assert not model.frozen.training
    assert model.untracked.training
    assert model.norm.running_mean.abs().sum() > 0


def test_a_model_without_batch_norm_is_unchanged():
    model = nn.Sequential(nn.Linear(3, 2))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, batch):
            return {"loss": F.cross_entropy(self.model(batch[0]), batch[1])}

    def never():
        raise AssertionError("no data is needed")

    trainer_of(Loss(), PreciseBN(1, model, never, 2)).train(0, 2)


def test_an_error_leaves_the_model_unchanged():
    model = Net()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    bad = [*batches(1), (torch.zeros(2, 7), torch.zeros(2))]
    trainer = trainer_of(model, PreciseBN(0, model, bad, 2))
    with pytest.raises(RuntimeError, match="running_mean"):
        trainer.train(0, 2)
    plain = Net()
    plain.load_state_dict(start)
    trainer_of(plain).train(0, 2)
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
    assert model.norm.momentum == 0.1
    assert not model.norm._forward_pre_hooks


def test_an_invalid_number_of_batches_is_an_error():
    with pytest.raises(ConfigError, match="num_iter"):
        PreciseBN(0, Net(), batches(1), 0)
    cfg = get_cfg()
    with pytest.raises(ConfigError, match="NUM_ITER"):
        cfg.TEST.PRECISE_BN.NUM_ITER = 0


# ---------------------------------------------------------------------- in a config's run


@DATASET_REGISTRY.register()
class drawn_images(Dataset):
    """Images with noise of torch's, numpy's and python's generators."""

    def __len__(self):
        return 77

    def __getitem__(self, index):
        noise = torch.randn(1, 4, 4) + float(np.random.rand())
        return torch.full((1, 4, 4), float(index % 4)) + noise, index % 4


@pytest.fixture
def make(tmp_path):
    def make(*overrides, folder="run", resume=False):
        settings = [
            *("DATASETS.TRAIN", ["drawn_images"], "DATASETS.TEST", [], "SOLVER.MAX_ITER", 16),
            *("TEST.EVAL_PERIOD", 3, "TEST.PRECISE_BN", {"ENABLED": True, "NUM_ITER": 4}),
        ]
        return config_trainer(tmp_path / folder, *settings, *overrides, resume=resume)

    return make


def test_training_is_not_affected(make):
    def run(enabled, folder):
        trainer = make("TEST.PRECISE_BN.ENABLED", enabled, folder=folder)
        seen = []
        trainer.register_hooks([CallbackHook(after_fetch=lambda t, batch: seen.append(batch[0].clone()))])
        trainer.train()
        return trainer, seen

    (plain, first), (precise, second) = run(False, "plain"), run(True, "precise")
    assert len(first) == len(second) == 16
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, plain.model.parameters(), precise.model.parameters()))
    changed = [
        name for name, value in plain.model.named_buffers() if not torch.equal(value, precise.model.get_buffer(name))
    ]
    assert changed
    assert all("running" in name for name in changed)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_run(make, tmp_path, workers):
    make("DATALOADER.NUM_WORKERS", workers, folder="whole").train()
    kill_at(make("DATALOADER.NUM_WORKERS", workers), 8)
    kill_at(make("DATALOADER.NUM_WORKERS", workers, resume=True), 15)
    make("DATALOADER.NUM_WORKERS", workers, resume=True).train()
    assert_equal_models(tmp_path / "run", tmp_path / "whole")


def test_each_computation_uses_other_batches(make):
    trainer = make("SOLVER.MAX_ITER", 8)
    trainer.train()
    data = trainer.find_hook(PreciseBN)._data
    orders = []
    for number in (2, 5, 2):
        with data.batches(trainer, number, 4) as (stream, count):
            assert count == 4
            orders.append(torch.cat([labels for _, labels in itertools.islice(stream, 4)]))
    assert torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], orders[1])
