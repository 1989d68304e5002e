import random
from itertools import chain, count, islice

import numpy as np
import pytest
import torch
from small_runs import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from hookline.config import ConfigError
from hookline.engine.data import EpochSampler, GlobalBatchSampler, TrainingSampler, build_batch_data_loader
from hookline.hooks import HookBase


def test_a_rank_without_samples_is_refused_before_training():
    with pytest.raises(ConfigError, match="BATCH_SIZE"):
        GlobalBatchSampler(EpochSampler(10), 2, world_size=4)
    with pytest.raises(ConfigError, match="DROP_LAST"):
        GlobalBatchSampler(EpochSampler(9), 4, world_size=2)
    assert len(GlobalBatchSampler(EpochSampler(9), 4, drop_last=True, world_size=2)) == 2


class Lazy:
    """Draws each index from all three global generators, and has no length."""

    def __iter__(self):
        for _ in count():
            yield (random.randrange(64) + np.random.randint(64) + int(torch.randint(64, ()))) % 64


def passes(rank=0, world_size=1, epochs=(0, 1, 2), start=0, number=8, seed=3):
    """The batches of some epochs in a process whose generators are where no other's are."""
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(random.SystemRandom().randrange(2**32))
    sampler = GlobalBatchSampler(Lazy(), 8, rank=rank, world_size=world_size, seed=seed)
    found = []
    for epoch in epochs:
        sampler.set_epoch(epoch, start)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        found += islice(sampler, number)
        assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        random.random(), np.random.rand(), torch.rand(())  # the model
    return found


def test_a_sampler_that_draws_is_the_same_on_every_rank_and_after_a_resume():
    whole = passes()
    ranks = [passes(rank, 3) for rank in range(3)]
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == whole
    assert passes(epochs=[1], start=24, number=5) == whole[11:16]
    assert passes(seed=4) != whole
    assert len({tuple(chain(*whole[at : at + 8])) for at in (0, 8, 16)}) == 3


DATA = TensorDataset(torch.arange(10.0)[:, None])


class Net(nn.Linear):
    def forward(self, batch):
        return super().forward(batch[0]).mean()


class Seen(HookBase):
    uses_indices = True

    def __init__(self):
        self.pairs = []

    def before_forward(self, batch):
        self.pairs.append((list(self.trainer.sample_indices), batch[0].flatten().tolist()))


def trainer_of(loader, *hooks):
    return make_trainer(*hooks, model=Net(1, 1), data=loader, lr=0.0)


def ours(workers=0, batch_size=4, **ranks):
    sampler = GlobalBatchSampler(EpochSampler(10, seed=1), batch_size, **ranks)
    return DataLoader(DATA, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)


def stacked(samples):
    return default_collate(samples)


def check(seen, number):
    assert len(seen.pairs) == number
    assert all(indices == values for indices, values in seen.pairs)
    assert len({tuple(indices) for indices, _ in seen.pairs}) > 1


@pytest.mark.parametrize(
    "loader",
    [
        lambda: ours(rank=1, world_size=2),
        lambda: ours(workers=1),
        lambda: build_batch_data_loader(DATA, TrainingSampler(10, seed=3), 4, num_workers=1, collate_fn=stacked),
    ],
    ids=["rank 1 of 2", "persistent workers", "endless, seeded samples, workers"],
)
def test_sample_indices_are_those_of_the_batch_in_every_pass(loader):
    trainer_of(loader(), seen := Seen()).train(0, 8)
    check(seen, 8)


def test_sample_indices_are_right_after_a_resume_and_with_a_new_loader():
    trainer = trainer_of(ours(), Seen())
    trainer.train(0, 4)
    resumed = trainer_of(ours(), seen := Seen())
    resumed.load_state_dict(trainer.state_dict())
    resumed.train(4, 7)
    resumed.reset_data_loader(lambda: ours(batch_size=5))
    resumed.train(7, 9)
    check(seen, 5)
    assert [len(indices) for indices, _ in seen.pairs[3:]] == [5, 5]


def test_a_function_finds_the_sample_indices_or_learns_which_data_has_them():
    trainer, found = trainer_of(ours()), []
    trainer.on("after_step")(lambda trainer: found.append(len(trainer.sample_indices)))
    trainer.train(0, 2)
    assert found == [4, 4]
    trainer = trainer_of([(torch.zeros(2, 1),)])
    trainer.on("after_step")(lambda trainer: trainer.sample_indices)
    with pytest.raises(AttributeError, match="GlobalBatchSampler"):
        trainer.train(0, 1)


@pytest.mark.parametrize("loader", [[(torch.zeros(2, 1),)], DataLoader(DATA, batch_size=2)])
def test_data_without_indices_is_refused_when_the_hook_is_registered(loader):
    with pytest.raises(ConfigError, match="uses_indices"):
        trainer_of(loader, Seen())
