import math

import pytest

from hookline.engine.data import EpochIterator, EpochSampler, GlobalBatchSampler, TrainingSampler
from hookline.engine.ranks.loss_weights import names_to_share


class Loader:
    """The batches of a batch sampler, as they are."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __iter__(self):
        return iter(self.batch_sampler)

    def __len__(self):
        return len(self.batch_sampler)


def shares(size, batch_size, world_size, rank, start=0, batches=None):
    """What each batch of an epoch counts with on a rank, and its samples there."""
    sampler = GlobalBatchSampler(EpochSampler(size), batch_size, rank=rank, world_size=world_size)
    iterator = EpochIterator(Loader(sampler))
    if start:
        iterator.load_state_dict({"epoch": 0, "position": 1, "samples": start, "batch_size": batch_size})
    for _ in range(batches or len(sampler)):
        samples = len(next(iterator))
        yield sampler.share(iterator.samples_before), samples


@pytest.mark.parametrize(("size", "batch_size"), [(37, 8), (20, 10), (11, 4), (64, 64)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_ranks_share_is_its_samples_over_the_mean_of_all_ranks(size, batch_size, world_size):
    ranks = [list(shares(size, batch_size, world_size, rank)) for rank in range(world_size)]
    for batch in zip(*ranks, strict=True):
        mean = sum(samples for _, samples in batch) / world_size
        assert [share for share, _ in batch] == pytest.approx([samples / mean for _, samples in batch])


def test_after_a_resume_with_another_batch_size_the_last_batch_still_counts_by_its_samples():
    ranks = [list(shares(37, 8, 2, rank, start=6, batches=4)) for rank in range(2)]
    assert sum(samples for rank in ranks for _, samples in rank) == 31
    last = [rank[-1] for rank in ranks]  # 7 samples
    assert [samples for _, samples in last] == [3, 4]
    assert [share for share, _ in last] == pytest.approx([3 / 3.5, 4 / 3.5])


def test_of_an_endless_stream_all_batches_are_full():
    for rank, samples in ((0, 2), (1, 3)):
        sampler = GlobalBatchSampler(TrainingSampler(7, seed=0, rank=0, world_size=1), 5, rank=rank, world_size=2)
        assert sampler.share(1000) == samples / 2.5
        assert math.isclose(sampler.share(0), samples / 2.5)


def test_names_are_those_of_write_metrics():
    assert names_to_share({"a": 1, "b": 2}, "val/") == {"val/a", "val/b", "val/total_loss"}
