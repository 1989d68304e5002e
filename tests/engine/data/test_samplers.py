from collections import Counter
from itertools import islice

import pytest
import torch
from torch.utils.data import SequentialSampler

from hookline.config import ConfigError
from hookline.engine import comm
from hookline.engine.data.samplers import (
    EpochSampler,
    GroupedBatchSampler,
    LengthGroupedSampler,
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    TrainingSampler,
)


def take(sampler, number):
    return list(islice(sampler, number))


ENDLESS = [
    lambda **ranks: TrainingSampler(10, seed=3, **ranks),
    lambda **ranks: RandomSubsetTrainingSampler(20, 0.5, seed_shuffle=3, seed_subset=4, **ranks),
    lambda **ranks: RepeatFactorTrainingSampler(torch.linspace(0.3, 2.6, 10), seed=3, **ranks),
]


def test_epoch_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch, start=0):
        sampler = EpochSampler(50, seed=seed)
        sampler.set_epoch(epoch, start)
        return list(sampler)

    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)}
    assert all(sorted(indices) == list(range(50)) for indices in orders.values())
    assert len({tuple(indices) for indices in orders.values()}) == 4  # (0, 1) and (1, 0) differ, too
    assert order(1, 1, start=30) == orders[1, 1][30:]
    assert list(EpochSampler(5, shuffle=False)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("make", ENDLESS)
def test_ranks_split_an_endless_stream_that_starts_anywhere(make, monkeypatch):
    sampler = make()
    stream = take(sampler, 60)
    assert type(sampler) is not TrainingSampler or sorted(stream[:10]) == sorted(stream[10:20]) == list(range(10))
    for start in (0, 7, 33):
        sampler.set_epoch(0, start=start)
        assert take(sampler, 60 - start) == stream[start:]
    monkeypatch.setattr(comm, "get_data_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(comm, "get_data_rank", lambda rank=rank: rank)
        assert take(make(), 20) == stream[:40][rank::2]


def test_repeat_factors_are_met_on_average_and_a_random_subset_is_fixed():
    counts = Counter(take(RepeatFactorTrainingSampler([1.0, 0.5, 2.25, 0.0], seed=0), 3750))
    assert counts[3] == 0
    assert [counts[i] / 1000 for i in range(3)] == pytest.approx([1.0, 0.5, 2.25], abs=0.06)
    stream = take(RandomSubsetTrainingSampler(100, 0.2, seed_shuffle=1, seed_subset=2), 60)
    assert list(Counter(stream).values()) == [3] * 20
    assert set(take(RandomSubsetTrainingSampler(100, 0.2, seed_shuffle=9, seed_subset=2), 20)) == set(stream)


class Texts(list):
    lengths = torch.randint(1000, (103,), generator=torch.Generator().manual_seed(0)).tolist()


def test_lengths_are_grouped_and_every_sample_is_seen_once():
    def order(epoch, start=0):
        sampler = LengthGroupedSampler(Texts(range(103)), batch_size=4, group=5, seed=1)
        sampler.set_epoch(epoch, start)
        return list(sampler)

    def spread(indices):
        batches = [[Texts.lengths[index] for index in indices[at : at + 4]] for at in range(0, 100, 4)]
        return sum(max(batch) - min(batch) for batch in batches)

    assert sorted(order(0)) == sorted(order(1)) == list(range(103))
    assert order(0) != order(1)
    assert order(2, start=2) == order(2)[2:]
    assert Texts.lengths[order(0)[0]] == max(Texts.lengths)
    assert spread(order(0)) < spread(list(EpochSampler(103, seed=1))) / 3
    with pytest.raises(ConfigError, match="10 lengths"):
        LengthGroupedSampler(range(10), 4, [1, 2, 3])


def test_repeat_factors_are_computed_from_annotations_and_categories():
    samples = [{"annotations": [{"category_id": 0}, {"category_id": 1}]}, {"annotations": [{"category_id": 0}]}]
    samples.append({"annotations": []})
    for given in (samples, [{0, 1}, {0}, ()]):
        factors = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(given, 0.5)
        assert factors.tolist() == pytest.approx([1.5**0.5, 1, 1])  # sqrt(0.5 / (1 / 3))
    with pytest.raises(KeyError, match="annotations"):
        RepeatFactorTrainingSampler.repeat_factors_from_category_frequency([{"file_name": "a"}], 0.5)


def test_a_batch_has_samples_of_one_group_in_the_order_of_the_sampler():
    batches = GroupedBatchSampler(SequentialSampler(range(10)), [0, 1] * 5, 2)
    assert list(batches) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert next(iter(batches)) == [8, 0]  # 8 was left over
