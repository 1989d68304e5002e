import math

import pytest
import torch

from hookline.engine.data import EpochIterator, EpochSampler, GlobalBatchSampler, TrainingSampler
from hookline.engine.step.loss_weights import LossWeights


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


@pytest.mark.parametrize(("size", "batch_size"), [(37, 8), (20, 10), (11, 4), (64, 64)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_share_of_a_rank_is_its_samples_over_the_mean_of_all_ranks(size, batch_size, world_size):
    ranks = [list(shares(size, batch_size, world_size, rank)) for rank in range(world_size)]
    for batch in zip(*ranks, strict=True):
        mean = sum(samples for _, samples in batch) / world_size
        assert [share for share, _ in batch] == pytest.approx([samples / mean for _, samples in batch])


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


def of_parts(counts, losses, tensors=False):
    """The weighted sum of the losses of micro-batches, after the final factor."""
    weights = LossWeights(EpochIterator([None]), None, ranks=1)
    total = 0.0
    for count, loss in zip(counts, losses, strict=True):
        found = {"loss": torch.tensor(loss), "num_items": torch.tensor(count) if tensors else count}
        total = total + weights.apply(found, share=1 / len(counts))["loss"]
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = total.reshape(1).clone()
    losses, num_items = weights.finish({"loss": total}, [{"params": [parameter]}], several=len(counts) > 1)
    assert num_items == sum(counts)
    assert parameter.grad == losses["loss"]
    return losses["loss"]


@pytest.mark.parametrize("tensors", [False, True])
def test_micro_batches_count_by_their_items(tensors):
    assert of_parts([3, 1], [2.0, 6.0], tensors) == pytest.approx(3.0)


@pytest.mark.parametrize("tensors", [False, True])
def test_a_micro_batch_without_items_does_not_count_although_its_mean_is_nan(tensors):
    assert of_parts([3, 0, 1], [2.0, math.nan, 6.0], tensors) == pytest.approx(3.0)
    assert of_parts([0, 0], [math.nan, math.nan], tensors) == 0


def test_micro_batches_without_items_count_by_their_samples():
    weights = LossWeights(EpochIterator([None]), None, ranks=1)
    total = sum(
        weights.apply({"loss": torch.tensor(loss)}, share)["loss"] for loss, share in ((2.0, 0.75), (6.0, 0.25))
    )
    assert total == pytest.approx(3.0)
    assert weights.finish({}, [], several=True) == ({}, None)


def test_a_repeated_micro_batch_does_not_count():
    weights = LossWeights(EpochIterator([None]), None, ranks=1)
    assert weights.apply({"loss": torch.tensor(math.nan), "num_items": 3}, share=0.0)["loss"] == 0
    assert weights.finish({}, [], several=True) == ({}, None)
