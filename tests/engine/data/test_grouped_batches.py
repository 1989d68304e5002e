from itertools import islice

import pytest
from torch.utils.data import SequentialSampler

from hookline.engine.data.samplers import GroupedBatchSampler, TrainingSampler


def test_a_batch_has_samples_of_one_group_in_the_order_of_the_sampler():
    batches = GroupedBatchSampler(SequentialSampler(range(10)), [0, 1] * 5, 2)
    assert list(batches) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert next(iter(batches)) == [8, 0]  # 8 was left over
    with pytest.raises(TypeError):
        len(batches)


def test_an_endless_sampler_gives_endless_batches():
    batches = GroupedBatchSampler(TrainingSampler(10, seed=0), [1, 0] * 5, 2)
    assert all((a - b) % 2 == 0 for a, b in islice(batches, 20))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="torch Sampler"):
        GroupedBatchSampler([0, 1], [0, 1], 2)
    with pytest.raises(ValueError, match="one number per sample"):
        GroupedBatchSampler(SequentialSampler(range(2)), [[0], [1]], 2)
