from itertools import count, islice

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from hookline.engine.data import ArrayDataset, EpochIterator, EpochSampler, GlobalBatchSampler


class Listener:
    def __init__(self):
        self.heard = []

    def after_epoch(self):
        self.heard.append("after")

    def before_epoch(self):
        self.heard.append("before")


class Sampled:
    """A loader of which the epoch and the start are noted."""

    def __init__(self, length):
        self.length, self.epochs = length, []

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter(range(self.length))


def loader(size=10, batch_size=3):
    dataset = ArrayDataset(torch.arange(size))
    sampler = GlobalBatchSampler(EpochSampler(size, seed=1), batch_size)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate_fn)


def take(iterator, number):
    return [batch[0].tolist() for batch in islice(iterator, number)]


def flat(batches):
    return [index for batch in batches for index in batch]


def test_a_finite_loader_is_started_over_again_and_again():
    assert list(islice(EpochIterator([1, 2, 3]), 8)) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_epoch_and_position_say_where_one_is():
    iterator = EpochIterator([1, 2])
    places = []
    for _ in range(5):
        next(iterator)
        places.append((iterator.epoch, iterator.position, iterator.ended))
    assert places == [(0, 1, False), (0, 2, True), (1, 1, False), (1, 2, True), (2, 1, False)]


def test_every_pass_has_its_epoch_set_once():
    sampled = Sampled(2)
    list(islice(EpochIterator(sampled), 6))
    assert sampled.epochs == [0, 1, 2]


def test_an_iterable_of_unknown_length_has_its_end_noticed():
    class Unknown:
        def __iter__(self):
            return iter("ab")

    listener = Listener()
    iterator = EpochIterator(Unknown(), listener=listener)
    assert list(islice(iterator, 5)) == ["a", "b", "a", "b", "a"]
    assert (iterator.epoch, iterator.length) == (2, None)
    assert listener.heard == ["after", "before"] * 2


def test_an_endless_loader_of_known_length_has_its_epochs_counted():
    iterator = EpochIterator(count(), length=3)
    assert list(islice(iterator, 7)) == list(range(7))
    assert (iterator.epoch, iterator.position) == (2, 1)


def test_counting_the_next_epoch_beforehand_tells_nobody():
    listener = Listener()
    iterator = EpochIterator([1, 2], listener=listener)
    for _ in range(3):
        if iterator.ended:
            iterator.next_epoch()
        next(iterator)
    assert iterator.epoch == 1
    assert listener.heard == []


@pytest.mark.parametrize("empty", [[], (), DataLoader(TensorDataset(torch.zeros(0)))], ids=["list", "tuple", "loader"])
def test_an_empty_loader_is_an_error_at_once(empty):
    with pytest.raises(ValueError, match="empty"):
        EpochIterator(empty)


@pytest.mark.parametrize("batches", [0, 2])
def test_a_generator_that_ends_is_an_error_that_says_why(batches):
    iterator = EpochIterator(i for i in range(batches))
    list(islice(iterator, batches))
    with pytest.raises(RuntimeError, match="a generator that can be read only once"):
        next(iterator)


def test_batches_differ_from_epoch_to_epoch_and_each_sample_is_seen_once():
    iterator = EpochIterator(loader())
    first, second = (flat(take(iterator, 4)) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


@pytest.mark.parametrize("number", range(10))
def test_a_loaded_position_goes_on_with_the_very_next_batch(number):
    whole = take(EpochIterator(loader()), 12)
    iterator = EpochIterator(loader())
    take(iterator, number)
    state = iterator.state_dict()
    fresh = EpochIterator(loader())
    assert fresh.load_state_dict(state)
    assert take(fresh, 12 - number) == whole[number:]
    assert (fresh.epoch, fresh.position) == (2, 4)


def test_a_position_is_kept_where_the_batch_size_changes():
    iterator = EpochIterator(loader(size=12, batch_size=3))
    seen = flat(take(iterator, 2))
    other = EpochIterator(loader(size=12, batch_size=2))
    assert other.load_state_dict(iterator.state_dict())
    rest = flat(take(other, 3))
    assert sorted(seen + rest) == list(range(12))
    assert other.ended


def test_nothing_is_read_to_get_to_a_position():
    class Counting(ArrayDataset):
        read = 0

        def __getitems__(self, indices):
            Counting.read += 1
            return super().__getitems__(indices)

    dataset = Counting(torch.arange(1000))
    batches = GlobalBatchSampler(EpochSampler(1000), 2)
    iterator = EpochIterator(DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate_fn))
    iterator.load_state_dict({"epoch": 3, "position": 400, "samples": 800})
    next(iterator)
    assert Counting.read == 1
    assert (iterator.epoch, iterator.position) == (3, 401)


@pytest.mark.parametrize(
    "plain",
    [[1, 2, 3], DataLoader(TensorDataset(torch.arange(3)), sampler=RandomSampler(range(3)))],
    ids=["list", "DataLoader"],
)
def test_a_loader_that_cannot_be_positioned_starts_its_epoch_over_and_says_so(plain):
    iterator = EpochIterator(plain)
    assert not iterator.load_state_dict({"epoch": 5, "position": 2})
    list(islice(iterator, 3))
    assert (iterator.epoch, iterator.position) == (5, 3)


def test_a_loader_that_cannot_be_positioned_still_goes_on_between_epochs():
    iterator = EpochIterator([1, 2, 3])
    list(islice(iterator, 3))
    state = iterator.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    fresh = EpochIterator([1, 2, 3])
    assert fresh.load_state_dict(state)
    assert fresh.epoch == 1


def test_the_iterator_is_made_when_it_is_first_needed():
    sampled = Sampled(2)
    iterator = EpochIterator(sampled)
    iterator.load_state_dict({"epoch": 4, "position": 0})
    assert sampled.epochs == []
    iterator.prepare()
    iterator.prepare()
    assert sampled.epochs == [4]
