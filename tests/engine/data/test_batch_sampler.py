import pickle
import random
from itertools import chain, count, islice

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from hookline.config import ConfigError
from hookline.engine.data import EpochSampler, GlobalBatchSampler, RankBatchSampler, TrainingSampler


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_global_batches_do_not_depend_on_the_number_of_ranks(world_size, drop_last):
    expected = list(GlobalBatchSampler(EpochSampler(21, seed=1), 8, drop_last))
    ranks = [GlobalBatchSampler(EpochSampler(21, seed=1), 8, drop_last, r, world_size) for r in range(world_size)]
    batches = [list(chain(*parts)) for parts in zip(*ranks, strict=True)]
    assert batches == expected
    assert [len(batch) for batch in batches] == ([8, 8] if drop_last else [8, 8, 5])
    assert all(len(rank) == len(batches) for rank in ranks)
    assert all(part for rank in ranks for part in rank)


def test_the_position_is_valid_for_another_number_of_ranks():
    whole = [index for batch in GlobalBatchSampler(EpochSampler(40, seed=1), 8) for index in batch]
    ranks = [GlobalBatchSampler(EpochSampler(40, seed=1), 8, rank=r, world_size=2) for r in range(2)]
    for rank in ranks:
        rank.set_epoch(0, start=16)
    assert [index for parts in zip(*ranks, strict=True) for part in parts for index in part] == whole[16:]


def test_an_unread_iterator_does_not_use_up_the_position():
    sampler = GlobalBatchSampler(EpochSampler(16, shuffle=False), 4)
    sampler.set_epoch(0, start=8)
    iter(sampler)  # as a DataLoader with workers does
    assert list(sampler) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert len(list(sampler)) == 4


@pytest.mark.parametrize("start", [0, 6])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_places_count_the_stream_of_all_ranks(start, world_size):
    stream = list(EpochSampler(21, seed=1))
    seen = {}
    for rank in range(world_size):
        sampler = GlobalBatchSampler(EpochSampler(21, seed=1), 6, rank=rank, world_size=world_size, placed=True)
        sampler.set_epoch(0, start)
        for batch in map(pickle.loads, map(pickle.dumps, sampler)):
            assert batch.epoch == 0
            seen |= dict(zip(batch.places, batch, strict=True))
    assert seen == dict(enumerate(stream[start:], start))


@pytest.mark.parametrize("start", [0, 6])
def test_places_of_a_sampler_split_by_rank_count_over_all_ranks(start):
    stream = list(islice(TrainingSampler(5, seed=1, rank=0, world_size=1), 30))
    seen = {}
    for rank in range(3):
        own = TrainingSampler(5, seed=1, rank=rank, world_size=3)
        sampler = RankBatchSampler(own, 6, rank=rank, world_size=3, placed=True)
        sampler.set_epoch(0, start)
        for batch in islice(sampler, (30 - start) // 6):
            assert len(batch) == 2
            seen |= dict(zip(batch.places, batch, strict=True))
    assert seen == dict(enumerate(stream[start:], start))


@pytest.mark.parametrize(("start", "left"), [(0, 3), (8, 2), (9, 2), (17, 1), (20, 1), (21, 0)])
def test_remaining_batches_follow_from_remaining_samples(start, left):
    sampler = GlobalBatchSampler(EpochSampler(21, seed=1), 8)
    assert sampler.batches_after(start) == left
    sampler.set_epoch(0, start)
    assert len(list(sampler)) == left


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


# ---------------------------------------------------------------------------- samplers that draw random numbers


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


DRAWING = {
    "random": lambda: RandomSampler(range(64)),
    "generator": lambda: RandomSampler(range(64), generator=torch.Generator()),
    "default": lambda: RandomSampler(range(64), generator=torch.default_generator),
    "subset": lambda: SubsetRandomSampler(range(64)),
    "weighted": lambda: WeightedRandomSampler(range(1, 65), 64),
    "lazy": Lazy,
    "own": Own,
}


def passes(make, rank=0, world_size=1, epochs=(0, 1, 2), start=0, number=8):
    """The batches of some epochs in a process whose generators are where no other's are."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(random.SystemRandom().randrange(2**32))
    sampler = GlobalBatchSampler(make(), 8, rank=rank, world_size=world_size, seed=3)
    found = []
    for epoch in epochs:
        sampler.set_epoch(epoch, start)
        for batch in islice(sampler, number):
            found.append(batch)
            random.random(), np.random.rand(), torch.rand(())  # the model
    return found


@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING)
def test_a_sampler_that_draws_is_the_same_on_every_rank_and_after_a_resume(make):
    whole = passes(make)
    ranks = [passes(make, rank, 3) for rank in range(3)]
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == whole
    assert passes(make, epochs=[1], start=24, number=5) == whole[11:16]
    assert len({tuple(chain(*whole[at : at + 8])) for at in (0, 8, 16)}) == 3
    if make in (DRAWING["random"], DRAWING["generator"], DRAWING["default"], DRAWING["subset"]):
        assert all(sorted(chain(*whole[at : at + 8])) == list(range(64)) for at in (0, 8, 16))


def test_the_order_of_a_sampler_that_draws_follows_the_seed():
    first, other = (list(GlobalBatchSampler(Own(), 8, seed=seed)) for seed in (3, 4))
    assert first != other


@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING)
def test_the_draws_of_a_sampler_do_not_change_those_of_the_run(make):
    sampler = GlobalBatchSampler(make(), 8)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    list(islice(sampler, 8))
    assert before[:2] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(before[2], torch.get_rng_state())


def test_a_long_stream_is_drawn_in_parts_that_continue_each_other():
    def stream(number, start=0):
        sampler = GlobalBatchSampler(Lazy(), 1000)
        sampler.set_epoch(0, start)
        return list(chain(*islice(sampler, number)))

    whole = stream(10)
    torch.rand(3)
    assert stream(3, 7000) == whole[7000:]


def test_a_sampler_of_one_rank_draws_other_numbers_there_and_the_same_after_a_resume():
    def drawn(rank, start=0):
        sampler = RankBatchSampler(RandomSampler(range(64)), 8, rank=rank, world_size=2)
        sampler.set_epoch(1, start)
        return list(sampler)

    assert drawn(0) != drawn(1)
    assert drawn(1, start=24) == drawn(1)[3:]
