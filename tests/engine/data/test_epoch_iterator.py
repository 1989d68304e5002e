from itertools import count, islice

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from hookline.engine.data import ArrayDataset, EpochIterator, EpochSampler, GlobalBatchSampler, TrainingSampler
from hookline.engine.data.loader import LimitedLoader


class Listener:
    def __init__(self):
        self.heard = []

    def after_epoch(self):
        self.heard.append("after")

    def before_epoch(self):
        self.heard.append("before")


class Sampled:
    """Records the calls of ``set_epoch``."""

    def __init__(self, length):
        self.length, self.epochs = length, []

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter(range(self.length))


def loader(size=10, batch_size=3, workers=0, **options):
    dataset = ArrayDataset(torch.arange(size))
    sampler = GlobalBatchSampler(EpochSampler(size, seed=1), batch_size, **options)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate_fn, num_workers=workers)


def endless(size=10, batch_size=3):
    dataset = ArrayDataset(torch.arange(size))
    sampler = GlobalBatchSampler(TrainingSampler(size, seed=1), batch_size)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate_fn)


def take(iterator, number):
    return [batch[0].tolist() for batch in islice(iterator, number)]


def flat(batches):
    return [index for batch in batches for index in batch]


def test_a_finite_loader_restarts_after_each_pass():
    assert list(islice(EpochIterator([1, 2, 3]), 8)) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_epoch_and_position_are_reported():
    iterator = EpochIterator([1, 2])
    places = []
    for _ in range(5):
        next(iterator)
        places.append((iterator.epoch, iterator.position, iterator.ended))
    assert places == [(0, 1, False), (0, 2, True), (1, 1, False), (1, 2, True), (2, 1, False)]


def test_set_epoch_is_called_once_per_pass():
    sampled = Sampled(2)
    list(islice(EpochIterator(sampled), 6))
    assert sampled.epochs == [0, 1, 2]


def test_the_end_of_an_iterable_of_unknown_length_is_noticed():
    class Unknown:
        def __iter__(self):
            return iter("ab")

    listener = Listener()
    iterator = EpochIterator(Unknown(), listener=listener)
    assert list(islice(iterator, 5)) == ["a", "b", "a", "b", "a"]
    assert (iterator.epoch, iterator.length) == (2, None)
    assert listener.heard == ["after", "before"] * 2


def test_epochs_of_an_endless_loader_of_known_length_are_counted():
    iterator = EpochIterator(count(), length=3)
    assert list(islice(iterator, 7)) == list(range(7))
    assert (iterator.epoch, iterator.position) == (2, 1)


def test_counting_the_next_epoch_in_advance_does_not_call_set_epoch():
    listener = Listener()
    iterator = EpochIterator([1, 2], listener=listener)
    for _ in range(3):
        if iterator.ended:
            iterator.next_epoch()
        next(iterator)
    assert iterator.epoch == 1
    assert listener.heard == []


@pytest.mark.parametrize("empty", [[], (), DataLoader(TensorDataset(torch.zeros(0)))], ids=["list", "tuple", "loader"])
def test_an_empty_loader_is_an_immediate_error(empty):
    with pytest.raises(ValueError, match="empty"):
        EpochIterator(empty)


@pytest.mark.parametrize("batches", [0, 2])
def test_an_exhausted_generator_is_an_error_that_says_why(batches):
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
def test_a_loaded_position_continues_with_the_next_batch(number):
    whole = take(EpochIterator(loader()), 12)
    iterator = EpochIterator(loader())
    take(iterator, number)
    state = iterator.state_dict()
    fresh = EpochIterator(loader())
    assert fresh.load_state_dict(state)
    assert take(fresh, 12 - number) == whole[number:]
    assert (fresh.epoch, fresh.position) == (2, 4)


@pytest.mark.parametrize("number", [1, 4, 6])
def test_batches_read_ahead_by_workers_do_not_count(number):
    whole = take(EpochIterator(loader()), 9)
    iterator = EpochIterator(loader(workers=2))
    take(iterator, number)
    fresh = EpochIterator(loader(workers=1))
    fresh.load_state_dict(iterator.state_dict())
    assert take(fresh, 9 - number) == whole[number:]


@pytest.mark.parametrize("size", [12, 13, 25])
@pytest.mark.parametrize("sizes", [(3, 2, 5), (2, 4, 3), (4, 5, 1), (1, 12, 4)])
def test_the_position_is_kept_over_repeated_changes_of_the_batch_size(size, sizes):
    seen, state = [], None
    for batch_size in sizes:
        iterator = EpochIterator(loader(size, batch_size))
        if state is not None:
            assert iterator.load_state_dict(state)
        if iterator.epoch == 0:
            seen += flat(take(iterator, 1))
        state = iterator.state_dict()
    while not iterator.ended and iterator.epoch == 0:
        seen += flat(take(iterator, 1))
    assert sorted(seen) == list(range(size))
    assert sorted(flat(take(iterator, -(-size // sizes[-1])))) == list(range(size))
    assert (iterator.epoch, iterator.ended) == (1, True)


def test_a_rest_smaller_than_the_new_batch_size_is_dropped():
    iterator = EpochIterator(loader(10, 2, drop_last=True))
    take(iterator, 4)
    other = EpochIterator(loader(10, 4, drop_last=True))
    assert other.load_state_dict(iterator.state_dict())
    assert (other.epoch, other.position) == (1, 0)
    assert take(other, 2) == take(EpochIterator(loader(10, 4, drop_last=True)), 4)[2:]


def test_epochs_of_an_endless_stream_continue_with_another_batch_size():
    whole = flat(take(EpochIterator(endless(size=40, batch_size=1), 40), 200))
    iterator = EpochIterator(endless(size=40, batch_size=2), 20)
    take(iterator, 39)
    other = EpochIterator(endless(size=40, batch_size=8), 5)
    other.load_state_dict(iterator.state_dict())
    assert (other.epoch, other.position) == (1, 4)
    assert flat(take(other, 7)) == whole[78:134]
    assert (other.epoch, other.position) == (3, 1)


def test_a_skipped_epoch_stays_skipped_after_a_resume():
    def skipping():
        iterator = EpochIterator(loader())
        take(iterator, 2)
        iterator.skip_epoch()
        return iterator

    whole = skipping()
    fresh = EpochIterator(loader())
    fresh.load_state_dict(skipping().state_dict())
    tail = take(fresh, 5)
    assert take(whole, 5) == tail
    assert sorted(flat(tail[:4])) == list(range(10))


@pytest.mark.parametrize("number", range(1, 7))
def test_limited_epochs_use_different_samples_and_can_be_resumed(number):
    def iterator():
        return EpochIterator(LimitedLoader(loader(), 2))

    whole = take(iterator(), 6)
    full = EpochIterator(loader())
    assert whole == [*take(full, 4)[:2], *take(full, 4)[:2], *take(full, 4)[:2]]
    before, after = iterator(), iterator()
    take(before, number)
    after.load_state_dict(before.state_dict())
    assert take(after, 6 - number) == whole[number:]


def test_an_epoch_shorter_than_its_loader_restarts_the_loader():
    def iterator():
        return EpochIterator(loader(), length=3)

    full = EpochIterator(loader())
    whole = [*take(full, 4)[:3], *take(full, 4)[:3]]
    before, after = iterator(), iterator()
    assert take(before, 5) == whole[:5]
    after.load_state_dict(before.state_dict())
    assert (after.epoch, after.position) == (1, 2)
    assert take(after, 1) == whole[5:]
    assert after.ended


def test_a_resume_reads_no_skipped_samples():
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
def test_a_loader_without_a_position_restarts_its_epoch_with_a_warning(plain):
    iterator = EpochIterator(plain)
    assert not iterator.load_state_dict({"epoch": 5, "position": 2})
    list(islice(iterator, 3))
    assert (iterator.epoch, iterator.position) == (5, 3)


def test_a_loader_without_a_position_continues_between_epochs():
    iterator = EpochIterator([1, 2, 3])
    list(islice(iterator, 3))
    state = iterator.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    fresh = EpochIterator([1, 2, 3])
    assert fresh.load_state_dict(state)
    assert fresh.epoch == 1


def test_the_iterator_is_created_on_first_use():
    sampled = Sampled(2)
    iterator = EpochIterator(sampled)
    iterator.load_state_dict({"epoch": 4, "position": 0})
    assert sampled.epochs == []
    iterator.prepare()
    iterator.prepare()
    assert sampled.epochs == [4]
