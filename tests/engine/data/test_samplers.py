from collections import Counter
from itertools import chain, islice

import pytest
import torch
from torch.utils.data import SequentialSampler

from hookline.config import ConfigError, get_cfg
from hookline.engine import comm
from hookline.engine.data import build_train_loader
from hookline.engine.data.batch_sampler import GlobalBatchSampler
from hookline.engine.data.samplers import (
    SAMPLER_REGISTRY,
    EpochSampler,
    GroupedBatchSampler,
    InferenceSampler,
    LengthGroupedSampler,
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    TrainingSampler,
)


def take(sampler, number):
    return list(islice(sampler, number))


ENDLESS = [
    lambda **ranks: TrainingSampler(10, seed=3, **ranks),
    lambda **ranks: TrainingSampler(10, shuffle=False, seed=3, **ranks),
    lambda **ranks: RandomSubsetTrainingSampler(20, 0.5, seed_shuffle=3, seed_subset=4, **ranks),
    lambda **ranks: RepeatFactorTrainingSampler(torch.linspace(0.3, 2.6, 10), seed=3, **ranks),
]


def test_epoch_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        sampler = EpochSampler(50, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)}
    assert all(sorted(indices) == list(range(50)) for indices in orders.values())
    assert len({tuple(indices) for indices in orders.values()}) == 4  # (0, 1) and (1, 0) differ, too
    assert orders[1, 1] == order(1, 1)


def test_epoch_sampler_starts_in_the_middle_once():
    sampler = EpochSampler(50, seed=7)
    sampler.set_epoch(2)
    whole = list(sampler)
    sampler.set_epoch(2, start=30)
    assert list(sampler) == whole[30:]
    assert list(sampler) == whole
    assert len(sampler) == 50


def test_epoch_sampler_keeps_the_data_order_on_request():
    assert list(EpochSampler(5, shuffle=False)) == [0, 1, 2, 3, 4]


def test_epoch_sampler_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    list(EpochSampler(50))
    assert torch.equal(before, torch.get_rng_state())


def test_the_training_sampler_repeats_passes_over_all_samples():
    stream = take(TrainingSampler(10, seed=0), 30)
    passes = [stream[:10], stream[10:20], stream[20:]]
    assert all(sorted(indices) == list(range(10)) for indices in passes)
    assert passes[0] != passes[1]


@pytest.mark.parametrize("make", ENDLESS)
def test_ranks_split_an_endless_stream(make):
    stream = take(make(rank=0, world_size=1), 40)
    for rank in range(2):
        assert take(make(rank=rank, world_size=2), 20) == stream[rank::2]


@pytest.mark.parametrize("make", ENDLESS)
@pytest.mark.parametrize("start", [0, 7, 10, 33])
def test_endless_streams_start_anywhere(make, start):
    sampler = make()
    stream = take(sampler, 60)
    sampler.set_epoch(0, start=start)
    assert take(sampler, 60 - start) == stream[start:]


def test_random_subset_is_fixed_and_of_the_right_size():
    stream = take(RandomSubsetTrainingSampler(100, 0.2, seed_shuffle=1, seed_subset=2), 60)
    assert Counter(stream) == dict.fromkeys(set(stream), 3)
    assert len(set(stream)) == 20
    other_shuffle = take(RandomSubsetTrainingSampler(100, 0.2, seed_shuffle=9, seed_subset=2), 20)
    assert set(other_shuffle) == set(stream)
    with pytest.raises(ValueError, match="subset_ratio"):
        RandomSubsetTrainingSampler(100, 1.5)


def test_repeat_factors_are_met_on_average():
    counts = Counter(take(RepeatFactorTrainingSampler([1.0, 0.5, 2.25, 0.0], seed=0), 3750))
    assert counts[3] == 0
    assert [counts[i] / 1000 for i in range(3)] == pytest.approx([1.0, 0.5, 2.25], abs=0.06)


def test_repeat_factors_follow_the_rarest_category():
    factors = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
        [[0], [0, 0], [0, 1], [0], []], repeat_thresh=0.8
    )
    assert factors.tolist() == pytest.approx([1, 1, 2, 1, 1])  # sqrt(0.8 / 0.2)


def test_repeat_factors_must_leave_something():
    with pytest.raises(ValueError, match="repeat_factors"):
        RepeatFactorTrainingSampler([0.0, 0.0])


@pytest.mark.parametrize(("size", "world_size"), [(10, 3), (2, 4), (0, 2), (8, 2)])
def test_inference_shares_hold_every_sample_once(monkeypatch, size, world_size):
    monkeypatch.setattr(comm, "get_world_size", lambda: world_size)
    shares = []
    for rank in range(world_size):
        monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
        sampler = InferenceSampler(size)
        shares.append(list(sampler))
        assert len(sampler) == len(shares[-1])
        assert list(InferenceSampler._get_local_indices(size, world_size, rank)) == shares[-1]
    assert list(chain(*shares)) == list(range(size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("size", [3, 60, 64, 103])
def test_lengths_are_grouped_and_every_sample_is_seen_once(size):
    class Texts(list):
        lengths = torch.randint(1000, (size,), generator=torch.Generator().manual_seed(0)).tolist()

    def order(epoch, start=0):
        sampler = LengthGroupedSampler(Texts(range(size)), batch_size=4, group=5, seed=1)
        sampler.set_epoch(epoch, start)
        return list(sampler)

    lengths = Texts.lengths
    assert sorted(order(0)) == list(range(size))
    assert order(0) == order(0)
    assert order(2, start=7) == order(2)[7:]
    if size < 60:
        return
    assert order(0) != order(1)
    assert lengths[order(0)[0]] == max(lengths)

    def spread(indices):
        batches = [[lengths[index] for index in indices[at : at + 4]] for at in range(0, size - 3, 4)]
        return sum(max(batch) - min(batch) for batch in batches)

    assert spread(order(0)) < spread(list(EpochSampler(size, seed=1))) / 3


def test_missing_lengths_are_an_error_that_says_what_to_add():
    with pytest.raises(ConfigError, match=r"10 lengths.*none"):
        LengthGroupedSampler(range(10), 4)
    with pytest.raises(ConfigError, match=r"10 lengths.*3"):
        LengthGroupedSampler(range(10), 4, [1, 2, 3])


# ---------------------------------------------------------------------------- detectron2's annotations and subclasses


def test_repeat_factors_are_computed_from_annotations():
    samples = [{"annotations": [{"category_id": 0}, {"category_id": 1}]}, {"annotations": [{"category_id": 0}]}]
    samples.append({"annotations": []})
    by_category = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency([{0, 1}, {0}, ()], 0.5)
    by_annotation = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(samples, 0.5)
    assert torch.equal(by_annotation, by_category)
    assert by_annotation[0] == pytest.approx(1.5**0.5)
    with pytest.raises(ValueError, match="has no 'annotations', only file_name"):
        RepeatFactorTrainingSampler.repeat_factors_from_category_frequency([{"file_name": "a"}], 0.5)


class OnlyEven(TrainingSampler):
    """A custom stream, with detectron2's attributes."""

    def __init__(self, size, seed=5):
        super().__init__(size, seed=seed)
        assert (self._size, self._shuffle, self._seed) == (size, True, seed)

    def _infinite_indices(self):
        generator = torch.Generator()
        generator.manual_seed(self._seed)
        while True:
            yield from (2 * torch.randperm(self._size // 2, generator=generator)).tolist()


class OwnIter(OnlyEven):
    def __iter__(self):
        yield from islice(self._infinite_indices(), self._rank, None, self._world_size)


class Doubled(RepeatFactorTrainingSampler):
    def _get_epoch_indices(self, generator):
        return super()._get_epoch_indices(generator).repeat_interleave(2)


@pytest.mark.parametrize("kind", [OnlyEven, OwnIter])
def test_a_stream_of_a_subclass_is_used_and_resumed(kind):
    whole = take(kind(10), 12)
    assert set(whole) == {0, 2, 4, 6, 8}
    batches = GlobalBatchSampler(kind(10), 3)
    batches.set_epoch(0, start=6)
    assert next(iter(batches)) == whole[6:9]


def test_indices_of_a_pass_of_a_subclass_are_used():
    sampler = Doubled(torch.ones(3), seed=1, shuffle=False)
    assert take(sampler, 8) == [0, 0, 1, 1, 2, 2, 0, 0]


def test_a_batch_sampler_of_a_config_gets_the_stream_for_all_ranks(monkeypatch):
    monkeypatch.setitem(SAMPLER_REGISTRY._obj_map, "OnlyEven", OnlyEven)
    cfg = get_cfg()
    cfg.DATASETS.TRAIN = ["synthetic"]
    cfg.DATALOADER.SAMPLER_TRAIN = "OnlyEven"
    cfg.MODEL.DEVICE = "cpu"
    monkeypatch.setattr(comm, "get_data_size", lambda: 2)
    monkeypatch.setattr(comm, "get_data_rank", lambda: 1)
    sampler = build_train_loader(cfg).batch_sampler.sampler
    assert take(sampler, 20) == list(islice(sampler._infinite_indices(), 20))


def test_a_batch_has_samples_of_one_group_in_the_order_of_the_sampler():
    batches = GroupedBatchSampler(SequentialSampler(range(10)), [0, 1] * 5, 2)
    assert list(batches) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert next(iter(batches)) == [8, 0]  # 8 was left over
    with pytest.raises(TypeError):
        len(batches)


def test_an_endless_sampler_gives_endless_batches():
    batches = GroupedBatchSampler(TrainingSampler(10, seed=0), [1, 0] * 5, 2)
    assert all((a - b) % 2 == 0 for a, b in islice(batches, 20))


def test_wrong_groups_are_named():
    with pytest.raises(ValueError, match="torch Sampler"):
        GroupedBatchSampler([0, 1], [0, 1], 2)
    with pytest.raises(ValueError, match="one number per sample"):
        GroupedBatchSampler(SequentialSampler(range(2)), [[0], [1]], 2)
