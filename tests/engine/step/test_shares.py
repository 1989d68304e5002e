import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookline.engine import SimpleTrainer
from hookline.engine.data import EpochIterator, EpochSampler, GlobalBatchSampler, TrainingSampler
from hookline.engine.modeling import ModelAdapter


class Loader:
    """The batches of a batch sampler."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __iter__(self):
        return iter(self.batch_sampler)

    def __len__(self):
        return len(self.batch_sampler)  # a TypeError if it is endless


def shares(size, batch_size, world_size, rank, start=0, batches=None):
    """The share of each batch of an epoch on a rank, and its number of samples there."""
    sampler = GlobalBatchSampler(EpochSampler(size), batch_size, rank=rank, world_size=world_size)
    iterator = EpochIterator(Loader(sampler))
    if start:
        iterator.load_state_dict({"epoch": 0, "position": 1, "samples": start, "batch_size": batch_size})
    for _ in range(batches or len(sampler)):
        samples = len(next(iterator))
        yield iterator.share, samples


def test_the_last_batch_counts_by_its_samples_after_a_resume_with_another_batch_size():
    ranks = [list(shares(37, 8, 2, rank, start=6, batches=4)) for rank in range(2)]
    assert sum(samples for rank in ranks for _, samples in rank) == 31
    last = [rank[-1] for rank in ranks]  # 7 samples
    assert [samples for _, samples in last] == [3, 4]
    assert [share for share, _ in last] == pytest.approx([3 / 3.5, 4 / 3.5])


def test_all_batches_of_an_endless_sampler_are_full():
    for rank, samples in ((0, 2), (1, 3)):
        sampler = GlobalBatchSampler(TrainingSampler(7, seed=0), 5, rank=rank, world_size=2)
        iterator = EpochIterator(Loader(sampler), 3)
        assert [(len(next(iterator)), iterator.share) for _ in range(5)] == [(samples, samples / 2.5)] * 5


class Stepping(nn.Linear):
    """Computes its loss in ``train_step``, over labels that count."""

    def train_step(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()])
def test_labels_that_do_not_count_are_exact_in_a_train_step_too(loss):
    labels = torch.tensor([0, -100, -100, -100, 1, 2, 0, 1])
    data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), labels)
    weights = []
    for steps in (1, 2):
        torch.manual_seed(0)
        model = Stepping(3, 3)
        adapter = ModelAdapter(loss=loss)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        SimpleTrainer(model, DataLoader(data, 8), optimizer, adapter=adapter, accumulation_steps=steps).train(0, 2)
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights)
