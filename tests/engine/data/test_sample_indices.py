"""``trainer.sample_indices``."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.engine.data import EpochSampler, GlobalBatchSampler
from hookline.engine.data.build import build_batch_data_loader
from hookline.engine.data.samplers import TrainingSampler
from hookline.hooks import HookBase, on


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, batch):
        return self.layer(batch[0]).mean()


class Noisy(TensorDataset):
    """Draws random numbers, so that its loader seeds each sample."""

    def __getitem__(self, index):
        torch.rand(())
        return super().__getitem__(index)


class Seen(HookBase):
    uses_indices = True

    def __init__(self):
        self.pairs = []

    def before_forward(self, batch):
        self.pairs.append((list(self.trainer.sample_indices), batch[0].flatten().tolist()))


def data(size=10, cls=TensorDataset):
    return cls(torch.arange(float(size))[:, None])


def trainer_of(loader, *hooks):
    model = Net()
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.0))
    trainer.register_hooks(hooks)
    return trainer


def ours(size=10, workers=0, cls=TensorDataset, **options):
    sampler = GlobalBatchSampler(EpochSampler(size, seed=1), 4, **options)
    return DataLoader(data(size, cls), batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)


def check(seen, number):
    assert len(seen.pairs) == number
    assert all(indices == values for indices, values in seen.pairs)
    assert len({tuple(indices) for indices, _ in seen.pairs}) > 1


@pytest.mark.parametrize(
    "loader",
    [
        lambda: ours(),
        lambda: ours(rank=1, world_size=2),
        lambda: ours(workers=1),
        lambda: build_batch_data_loader(data(), TrainingSampler(10), 4, collate_fn=torch.utils.data.default_collate),
        pytest.param(
            lambda: build_batch_data_loader(
                data(cls=Noisy), EpochSampler(10, seed=3), 4, num_workers=1, collate_fn=torch.utils.data.default_collate
            ),
            marks=pytest.mark.slow,
        ),
        lambda: DataLoader(data(), batch_size=4, shuffle=True),
        lambda: DataLoader(data(), batch_size=4, shuffle=True, num_workers=2),
    ],
    ids=["ours", "rank 1 of 2", "persistent workers", "endless", "seeded samples, workers", "torch", "torch, workers"],
)
def test_they_are_those_of_the_batch_in_every_pass(loader):
    trainer_of(loader(), seen := Seen()).train(0, 8)
    check(seen, 8)


def test_after_a_resume_too():
    trainer = trainer_of(ours(), Seen())
    trainer.train(0, 4)
    resumed = trainer_of(ours(), seen := Seen())
    resumed.load_state_dict(trainer.state_dict())
    resumed.train(4, 9)
    check(seen, 5)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_hook_that_joins_during_a_pass_has_them_from_the_next_on(workers):
    seen = Seen()
    trainer = trainer_of(ours(workers=workers))
    waiting = []

    @on("before_step", trainer=trainer, when=lambda trainer: trainer.iter == 1)
    def join(trainer):
        trainer.register_hooks([type("Early", (HookBase,), {"uses_indices": True})()])

    @on("after_step", trainer=trainer, when=lambda trainer: trainer.iter == 2)
    def early(trainer):
        with pytest.raises(AttributeError, match="from the next pass on"):
            waiting.append(trainer.sample_indices)
        trainer.register_hooks([seen])

    trainer.train(0, 9)
    check(seen, 6)


def test_without_a_hook_that_asks_the_loader_is_read_as_it_is_and_an_error_says_how_to_ask():
    trainer = trainer_of(ours())
    assert trainer._data_loader_iter._noted is None

    @on("after_step", trainer=trainer)
    def look(trainer):
        return trainer.sample_indices

    with pytest.raises(AttributeError, match="uses_indices = True"):
        trainer.train(0, 1)


def test_a_function_may_ask_and_a_new_loader_is_followed():
    trainer = trainer_of(ours())
    found = []

    @on("after_step", trainer=trainer, uses_indices=True)
    def look(trainer):
        found.append(len(trainer.sample_indices))

    trainer.train(0, 2)
    trainer.reset_data_loader(lambda: DataLoader(data(), batch_size=5))
    trainer.train(2, 4)
    assert found == [4, 4, 5, 5]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(8, 1))


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([(torch.zeros(2, 1),)], "list is no DataLoader"),
        (DataLoader(Stream(), batch_size=2), "Stream is iterable"),
    ],
)
def test_data_without_indices_is_refused_when_the_hook_is_registered(loader, reason):
    with pytest.raises(ConfigError, match=f"uses_indices = True, and the training data has no indices: {reason}"):
        trainer_of(loader, Seen())
