"""Weighted draws, data sets mixed by ratio, and batches by tokens: on any number of ranks, and from any position."""

from collections import Counter

import pytest
import torch
from small_runs import config_trainer

from hookline.config import ConfigError
from hookline.engine.data import ArrayDataset, EpochSampler, GlobalBatchSampler, WeightedSampler
from hookline.engine.data.mixing import MixedSampler, TokenBatchSampler

LENGTHS = [3 + i * 7 % 20 for i in range(101)]
SMALL = {"NAME": "synthetic", "ARGS": {"size": 10, "shape": [1, 8, 8]}, "RATIO": 3}
LARGE = {"NAME": "synthetic", "ARGS": {"size": 100, "shape": [1, 8, 8]}, "RATIO": 1}


def labels(*counts):
    classes = torch.cat([torch.full((count,), number) for number, count in enumerate(counts)])
    return ArrayDataset(torch.zeros(len(classes), 1), classes)


def by_first_word(dataset):
    return [0] * 4 + [1.0] * (len(dataset) - 4)


def epochs(sampler, number):
    for epoch in range(number):
        sampler.set_epoch(epoch)
        yield list(sampler)


def test_balanced_weights_draw_each_class_equally_often():
    dataset = labels(900, 90, 10)
    drawn = Counter(dataset.tensors[1][i].item() for epoch in epochs(WeightedSampler(dataset), 10) for i in epoch)
    assert all(abs(drawn[number] - 10_000 / 3) < 200 for number in range(3))


def test_weights_are_a_list_or_a_function_of_the_data_set():
    assert set(WeightedSampler(labels(3, 3), [0, 1, 0, 0, 0, 2])) == {1, 5}
    function = f"{__name__}:by_first_word"
    sampler = WeightedSampler(labels(3, 3), function, num_samples=50)
    assert len(sampler) == len(list(sampler)) == 50
    assert set(sampler) == {4, 5}
    for wrong in ([1.0] * 5, [-1.0] + [1.0] * 5, [0.0] * 6):
        with pytest.raises(ConfigError, match="weights"):
            WeightedSampler(labels(3, 3), wrong)
    with pytest.raises(ConfigError, match="targets"):
        WeightedSampler(range(5))


def test_sets_are_mixed_in_their_ratio_and_each_is_read_to_its_end():
    drawn = list(epochs(MixedSampler([10, 100], [3, 1]), 4))
    assert [sum(i < 10 for i in epoch) for epoch in drawn] == [82] * 4  # 3/4 of 110
    for size, first in ((10, 0), (100, 10)):
        mine = [i for epoch in drawn for i in epoch if first <= i < first + size]
        passes = [mine[k : k + size] for k in range(0, len(mine) - size + 1, size)]
        assert all(sorted(one) == list(range(first, first + size)) for one in passes)
        assert size == 100 or passes[0] != passes[1]


def test_batches_keep_the_budget_and_hold_each_sample_once():
    sampler = TokenBatchSampler(LENGTHS, 64, seed=1, rank=0, world_size=1)
    first, second = epochs(sampler, 2)
    for batches in (first, second):
        assert len(batches) == len(sampler)
        assert max(len(batch) * max(LENGTHS[i] for i in batch) for batch in batches) <= 64
        assert sorted(i for batch in batches for i in batch) == list(range(101))
    assert first != second
    with pytest.raises(ConfigError, match="MAX_TOKENS"):
        TokenBatchSampler(LENGTHS, 20, rank=0, world_size=1)  # the longest sample has 22


def batches_of(make, rank, ranks, epoch, start=0):
    sampler = make(rank, ranks)
    sampler.set_epoch(epoch, start)
    return list(sampler)


@pytest.mark.parametrize(
    "make",
    [
        lambda rank, ranks: GlobalBatchSampler(EpochSampler(21, seed=1), 8, False, rank, ranks),
        lambda rank, ranks: GlobalBatchSampler(EpochSampler(21, seed=1), 8, True, rank, ranks),
        lambda rank, ranks: GlobalBatchSampler(WeightedSampler(labels(29, 3)), 8, rank=rank, world_size=ranks),
        lambda rank, ranks: GlobalBatchSampler(MixedSampler([10, 30], [1, 1]), 8, rank=rank, world_size=ranks),
        lambda rank, ranks: TokenBatchSampler(LENGTHS, 64, rank=rank, world_size=ranks),
    ],
    ids=["epochs", "full batches", "weighted", "mixed", "tokens"],
)
def test_ranks_share_the_batches_of_one_rank_and_start_anywhere(make):
    whole = batches_of(make, 0, 1, 3)
    parts = zip(*(batches_of(make, rank, 2, 3) for rank in range(2)), strict=True)
    assert [[*first, *second] for first, second in parts] == whole
    unit = make(0, 1).batch_size
    assert batches_of(make, 0, 1, 3, start=2 * unit) == whole[2:]


def test_ratios_of_a_config_train(tmp_path):
    trainer = config_trainer(tmp_path, "DATASETS.TRAIN", [SMALL, LARGE], "SOLVER.MAX_ITER", 3)
    assert isinstance(trainer.data_loader.batch_sampler.sampler, MixedSampler)
    trainer.train()


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("RATIO", ("DATASETS.TRAIN", [SMALL, "synthetic"])),
        ("SAMPLER_TRAIN", ("DATASETS.TRAIN", [SMALL, LARGE], "DATALOADER.SAMPLER_TRAIN", "TrainingSampler")),
        ("lengths", ("DATALOADER.MAX_TOKENS", 64, "DATALOADER.BATCH_SIZE", 16)),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, key, overrides):
    with pytest.raises(ConfigError, match=key):
        config_trainer(tmp_path, *overrides)
