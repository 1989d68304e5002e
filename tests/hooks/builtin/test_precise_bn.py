"""Batch norm statistics are recomputed, and training is not affected."""

from functools import partial

import numpy as np
import pytest
import torch
from small_runs import Classifier, assert_equal_models, config_trainer, kill_at, labelled_batches, make_trainer
from torch.utils.data import Dataset

from hookline.engine.data import DATASET_REGISTRY
from hookline.hooks import CallbackHook, EvalHook, PreciseBN


@pytest.mark.parametrize(
    ("data", "num_iter", "used"),
    [
        (labelled_batches(10, seed=1), 8, 8),
        (labelled_batches(3, seed=1), 200, 3),
        (lambda: labelled_batches(4, seed=1), 4, 4),
    ],
    ids=["the first", "a short loader once", "a function"],
)
def test_statistics_are_those_of_the_data_before_the_evaluation_of_the_same_step(data, num_iter, used):
    model, seen = Classifier(), []
    buffer = model.norm.running_mean
    look = EvalHook(2, lambda: seen.append((model.norm.running_mean.clone(), model.norm.running_var.clone())))
    make_trainer(PreciseBN(2, model, data, num_iter), look, model=model).train(0, 5)
    x = torch.cat([x for x, _ in labelled_batches(used, seed=1)])
    assert len(seen) == 3
    for mean, variance in seen:
        torch.testing.assert_close(mean, x.mean(0))
        torch.testing.assert_close(variance, x.var(0, unbiased=False))
    assert model.norm.running_mean is buffer
    assert model.norm.momentum == 0.1
    assert model.norm.num_batches_tracked == 5  # only steps


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


@pytest.mark.parametrize("sampler", ["EpochSampler", "TrainingSampler"])
def test_training_is_not_affected_and_a_resumed_run_is_equal_to_the_bit(make, tmp_path, sampler):
    make = partial(make, "DATALOADER.SAMPLER_TRAIN", sampler)

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
    buffers = dict(precise.model.named_buffers())
    changed = [name for name, value in plain.model.named_buffers() if not torch.equal(value, buffers[name])]
    assert changed
    assert all("running" in name for name in changed)
    kill_at(make(), 10)
    make(resume=True).train()
    assert_equal_models(tmp_path / "run", tmp_path / "precise")
