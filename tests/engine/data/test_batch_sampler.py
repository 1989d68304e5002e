import random
from itertools import chain, count, islice

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler

from hookline.config import ConfigError
from hookline.engine.data import EpochSampler, GlobalBatchSampler, TrainingSampler


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("start", [0, 8])
def test_global_batches_do_not_depend_on_the_number_of_ranks(world_size, drop_last, start):
    expected = list(GlobalBatchSampler(EpochSampler(21, seed=1), 8, drop_last))[start // 8 :]
    ranks = [GlobalBatchSampler(EpochSampler(21, seed=1), 8, drop_last, r, world_size) for r in range(world_size)]
    for rank in ranks:
        rank.set_epoch(0, start)
    parts = [list(rank) for rank in ranks]
    assert [list(chain(*batch)) for batch in zip(*parts, strict=True)] == expected
    assert [len(batch) for batch in expected] == ([8, 8] if drop_last else [8, 8, 5])[start // 8 :]
    assert all(part for rank in parts for part in rank)


def test_samplers_that_cannot_seek_are_drawn_and_skipped():
    sampler = GlobalBatchSampler(SequentialSampler(range(10)), 4)
    sampler.set_epoch(3, start=4)
    assert list(sampler) == [[4, 5, 6, 7], [8, 9]]
    assert next(iter(sampler)) == [0, 1, 2, 3]


def test_an_endless_stream_has_no_length():
    sampler = GlobalBatchSampler(TrainingSampler(5, seed=0), 4)
    assert [len(batch) for batch in islice(sampler, 10)] == [4] * 10
    with pytest.raises(TypeError):
        len(sampler)


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


class Own:
    """Draws from generators of its own, which go on from epoch to epoch."""

    def __init__(self):
        self._python, self._numpy = random.Random(0), np.random.default_rng(0)
        self._old, self._torch = np.random.RandomState(0), torch.Generator()

    def __len__(self):
        return 64

    def __iter__(self):
        for index in torch.randperm(64, generator=self._torch).tolist():
            yield (index + self._python.randrange(64) + int(self._numpy.integers(64)) + self._old.randint(64)) % 64


def passes(make, rank=0, world_size=1, epochs=(0, 1, 2), start=0, number=8, seed=3):
    """The batches of some epochs in a process whose generators are where no other's are."""
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(random.SystemRandom().randrange(2**32))
    sampler = GlobalBatchSampler(make(), 8, rank=rank, world_size=world_size, seed=seed)
    found = []
    for epoch in epochs:
        sampler.set_epoch(epoch, start)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        found += islice(sampler, number)
        assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        random.random(), np.random.rand(), torch.rand(())  # the model
    return found


@pytest.mark.parametrize("make", [Lazy, Own])
def test_a_sampler_that_draws_is_the_same_on_every_rank_and_after_a_resume(make):
    whole = passes(make)
    ranks = [passes(make, rank, 3) for rank in range(3)]
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == whole
    assert passes(make, epochs=[1], start=24, number=5) == whole[11:16]
    assert passes(make, seed=4) != whole
    assert len({tuple(chain(*whole[at : at + 8])) for at in (0, 8, 16)}) == 3
