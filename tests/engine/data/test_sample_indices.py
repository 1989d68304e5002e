"""``trainer.sample_indices``."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.engine.data import EpochSampler, GlobalBatchSampler, TrainingSampler, build_batch_data_loader
from hookline.hooks import HookBase, on

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
    model = Net(1, 1)
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.0))
    trainer.register_hooks(hooks)
    return trainer


def ours(workers=0, batch_size=4, **ranks):
    sampler = GlobalBatchSampler(EpochSampler(10, seed=1), batch_size, **ranks)
    return DataLoader(DATA, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)


def check(seen, number):
    assert len(seen.pairs) == number
    assert all(indices == values for indices, values in seen.pairs)
    assert len({tuple(indices) for indices, _ in seen.pairs}) > 1


@pytest.mark.parametrize(
    "loader",
    [
        lambda: ours(rank=1, world_size=2),
        lambda: ours(workers=1),
        lambda: build_batch_data_loader(
            DATA, TrainingSampler(10, seed=3), 4, num_workers=1, collate_fn=lambda samples: default_collate(samples)
        ),
    ],
    ids=["rank 1 of 2", "persistent workers", "endless, seeded samples, workers"],
)
def test_they_are_those_of_the_batch_in_every_pass(loader):
    trainer_of(loader(), seen := Seen()).train(0, 8)
    check(seen, 8)


def test_they_are_right_after_a_resume_and_with_a_new_loader():
    trainer = trainer_of(ours(), Seen())
    trainer.train(0, 4)
    resumed = trainer_of(ours(), seen := Seen())
    resumed.load_state_dict(trainer.state_dict())
    resumed.train(4, 7)
    resumed.reset_data_loader(lambda: ours(batch_size=5))
    resumed.train(7, 9)
    check(seen, 5)
    assert [len(indices) for indices, _ in seen.pairs[3:]] == [5, 5]


def test_a_hook_or_function_must_ask_for_them():
    trainer, found = trainer_of(ours()), []
    on("after_step", trainer=trainer, uses_indices=True)(lambda trainer: found.append(len(trainer.sample_indices)))
    trainer.train(0, 2)
    assert found == [4, 4]
    trainer = trainer_of(ours())
    on("after_step", trainer=trainer)(lambda trainer: trainer.sample_indices)
    with pytest.raises(AttributeError, match="uses_indices"):
        trainer.train(0, 1)


@pytest.mark.parametrize("loader", [[(torch.zeros(2, 1),)], DataLoader(DATA, batch_size=2)])
def test_data_without_indices_is_refused_when_the_hook_is_registered(loader):
    with pytest.raises(ConfigError, match="uses_indices"):
        trainer_of(loader, Seen())
