"""Iterable data sets: batches that do not depend on ranks and workers, and exact resumes."""

import gc
import logging
import random
import weakref
from functools import cache
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hookline.config import ConfigError, get_cfg
from hookline.engine.data import (
    DATASET_REGISTRY,
    EpochIterator,
    ShardedIterable,
    StreamLoader,
    build_test_loader,
    build_train_loader,
)

SIZE, BATCH = 23, 4


class Plain:
    """Yields numbers and random draws, without a position. Counts the samples that are read."""

    def __init__(self, size=SIZE):
        self.size, self.asked = size, 0

    def __iter__(self):
        offset = random.random()
        for number in range(self.size):
            self.asked += 1
            yield [float(number), offset, random.random(), np.random.randn(), torch.rand(()).item()]

    def __len__(self):
        return self.size


class Seeking(Plain):
    """Can start at any position."""

    deterministic = True

    def set_epoch(self, epoch, start=0):
        self.epoch, self.start = epoch, start

    def __iter__(self):
        for number in range(self.start, self.size):
            self.asked += 1
            yield [float(number + 100 * self.epoch)]


class Remembering(Plain):
    """Shuffles with a buffer, and has ``state_dict``."""

    def __init__(self, size=SIZE):
        super().__init__(size)
        self.buffer, self.next = [], 0

    def __iter__(self):
        while self.next < self.size or self.buffer:
            while len(self.buffer) < 5 and self.next < self.size:
                self.asked += 1
                self.buffer.append(self.next)
                self.next += 1
            yield [float(self.buffer.pop(random.randrange(len(self.buffer)))), np.random.rand()]
        self.buffer, self.next = [], 0

    def state_dict(self):
        return {"buffer": list(self.buffer), "next": self.next}

    def load_state_dict(self, state):
        self.buffer, self.next = list(state["buffer"]), state["next"]


class Iterator:
    """An iterator with ``state_dict``."""

    def __init__(self, size):
        self.size, self.next = size, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.size:
            raise StopIteration
        self.next += 1
        return [float(self.next), random.random()]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Iterating(Plain):
    def __iter__(self):
        return Iterator(self.size)


def augment(sample):
    return [*sample, random.random(), np.random.randn(), torch.rand(()).item()]


def sharded(source):
    return ShardedIterable(source(), augment)


class OwnShards(IterableDataset):
    """Splits its numbers between ranks and workers."""

    shares_itself_out = True

    def __init__(self, size=SIZE):
        self.size, self.next = size, 0

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while self.next * step + first < self.size:
            self.next += 1
            yield [float((self.next - 1) * step + first), random.random(), np.random.randn(), torch.rand(()).item()]
        self.next = 0


class OwnShardsRemembered(OwnShards):
    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def collate(samples):
    return torch.cat([torch.tensor(samples, dtype=torch.float64), torch.rand(len(samples), 1)], 1)


def make_loader(dataset, workers=0, rank=0, world_size=1, batch_size=BATCH, **options):
    return StreamLoader(
        dataset,
        batch_size,
        seed=7,
        num_workers=workers,
        collate_fn=collate,
        rank=rank,
        world_size=world_size,
        generator=torch.Generator(),
        **options,
    )


def read(iterator, number):
    return [batch.tolist() for batch in islice(iterator, number)]


@pytest.fixture(autouse=True)
def _scrambled():
    """Like a new process, whose generators have another state."""
    random.seed()
    np.random.seed()
    torch.seed()


SOURCES = [Plain, Seeking, Remembering, Iterating]


@pytest.mark.parametrize("source", SOURCES)
def test_batches_are_the_same_with_any_number_of_workers(source):
    expected = read(EpochIterator(make_loader(sharded(source))), 13)
    assert sorted(row[0] for batch in expected[:6] for row in batch) == [
        float(number + (source is Iterating)) for number in range(SIZE)
    ]
    for workers in (1, 2, 3):
        assert read(EpochIterator(make_loader(sharded(source), workers)), 13) == expected


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_split_the_same_batches(source, world_size):
    def numbers(**kwargs):  # without the draws of the collate function, which depend on the rank's part
        return [
            [row[:-1] for row in batch] for batch in read(EpochIterator(make_loader(sharded(source), **kwargs)), 12)
        ]

    ranks = [numbers(rank=rank, world_size=world_size, workers=rank) for rank in range(world_size)]
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == numbers()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("killed_after", "before", "after"), [(1, 2, 3), (6, 2, 0), (8, 0, 2), (8, 2, 3)])
def test_a_resume_reads_the_same_bytes_with_any_number_of_workers(source, killed_after, before, after):
    whole = read(EpochIterator(make_loader(sharded(source))), 14)
    iterator = EpochIterator(make_loader(sharded(source), before))
    assert read(iterator, killed_after) == whole[:killed_after]
    fresh = EpochIterator(make_loader(sharded(source), after))
    assert fresh.load_state_dict(iterator.state_dict())
    assert read(fresh, 14 - killed_after) == whole[killed_after:]


def test_a_resume_on_other_ranks_and_with_another_batch_size_sees_every_sample_once():
    iterator = EpochIterator(make_loader(sharded(Remembering), 2, rank=1, world_size=2))
    list(islice(iterator, 3))
    seen = read(EpochIterator(make_loader(sharded(Remembering))), 3)
    rest = []
    for rank in range(3):
        fresh = EpochIterator(make_loader(sharded(Remembering), rank=rank, world_size=3, batch_size=6))
        fresh.load_state_dict(iterator.state_dict())
        rest += read(fresh, 2)
    assert sorted(row[0] for batch in seen + rest for row in batch) == list(range(SIZE))


@cache
def whole_run(dataset, workers):
    return read(EpochIterator(make_loader(dataset(), workers)), 15)


@pytest.mark.parametrize("dataset", [OwnShards, OwnShardsRemembered])
@pytest.mark.parametrize(("workers", "killed_after"), [(0, 3), (0, 9), (2, 1), (2, 9), (3, 3), (3, 5)])
def test_a_set_that_splits_itself_resumes_in_each_worker(dataset, workers, killed_after):
    whole = whole_run(dataset, workers)
    assert len({row[1] for batch in whole[:6] for row in batch}) == sum(map(len, whole[:6]))
    iterator = EpochIterator(make_loader(dataset(), workers))
    assert read(iterator, killed_after) == whole[:killed_after]
    fresh = EpochIterator(make_loader(dataset(), workers))
    assert fresh.load_state_dict(iterator.state_dict())
    assert read(fresh, 15 - killed_after) == whole[killed_after:]


def test_a_set_that_splits_itself_cannot_resume_with_other_workers_or_ranks():
    iterator = EpochIterator(make_loader(OwnShards(), 2))
    next(iterator)
    for options, message in (({"workers": 1}, "NUM_WORKERS"), ({"workers": 2, "world_size": 2}, "ranks")):
        fresh = EpochIterator(make_loader(OwnShards(), **options))
        fresh.load_state_dict(iterator.state_dict())
        with pytest.raises(ConfigError, match=message):
            next(fresh)


@pytest.mark.parametrize("source", [Seeking, Remembering])
def test_a_resume_reads_no_skipped_samples(source):
    iterator = EpochIterator(make_loader(ShardedIterable(source(10_000))))
    list(islice(iterator, 2000))
    data = source(10_000)
    fresh = EpochIterator(make_loader(ShardedIterable(data)))
    fresh.load_state_dict(iterator.state_dict())
    next(fresh)
    assert data.asked <= 2 * BATCH


def test_a_set_without_a_state_is_read_again_with_a_warning(caplog):
    iterator = EpochIterator(make_loader(ShardedIterable(Plain())))
    list(islice(iterator, 3))
    data = Plain()
    fresh = EpochIterator(make_loader(ShardedIterable(data)))
    assert fresh.load_state_dict(iterator.state_dict())
    with caplog.at_level(logging.WARNING, "hookline"):
        next(fresh)
    assert "Plain has no state_dict(): to resume, 12 samples are read and discarded" in caplog.text
    assert data.asked == 16


def test_at_the_end_of_an_epoch_nothing_is_read_again_or_logged(caplog):
    iterator = EpochIterator(make_loader(ShardedIterable(Plain())))
    whole = read(iterator, 6)
    data = Plain()
    fresh = EpochIterator(make_loader(ShardedIterable(data)))
    with caplog.at_level(logging.WARNING, "hookline"):
        assert fresh.load_state_dict(iterator.state_dict())
        assert read(fresh, 6) == read(iterator, 6) != whole
    assert not caplog.text
    assert data.asked == SIZE


@pytest.mark.parametrize("dataset", [lambda: sharded(Remembering), OwnShardsRemembered])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaded_position_is_saved_unchanged_before_the_first_batch(dataset, workers):
    iterator = EpochIterator(make_loader(dataset(), workers))
    whole = read(iterator, 3)
    fresh = EpochIterator(make_loader(dataset(), workers))
    fresh.load_state_dict(iterator.state_dict())
    again = EpochIterator(make_loader(dataset(), workers))
    again.load_state_dict(fresh.state_dict())
    assert read(again, 3) == read(iterator, 3) != whole


def test_each_epoch_draws_other_numbers_and_calls_set_epoch():
    epochs = [read(EpochIterator(make_loader(sharded(Seeking), workers)), 12) for workers in (0, 2)]
    assert epochs[0] == epochs[1]
    first, second = epochs[0][:6], epochs[0][6:]
    assert [row[0] + 100 for batch in first for row in batch] == [row[0] for batch in second for row in batch]
    assert not {row[1] for batch in first for row in batch} & {row[1] for batch in second for row in batch}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [4, 4, 4, 4, 4, 3]),
        ({"drop_last": True}, [4] * 5),
        ({"world_size": 4}, [1] * 5),  # three samples are too few for four ranks: no rank takes that step
        ({"world_size": 4, "rank": 3, "keep_rest": True}, [1] * 6),
        ({"world_size": 4, "keep_rest": True}, [1] * 5),
    ],
)
def test_sizes_of_a_streams_batches(workers, options, sizes):
    assert [len(batch) for batch in make_loader(sharded(Plain), workers, **options)] == sizes


def test_a_restarted_loader_is_freed_at_once():
    gc.disable()
    try:
        iterator = EpochIterator(make_loader(sharded(Plain)))
        list(islice(iterator, 8))
        reference = weakref.ref(iterator)
        del iterator
        assert reference() is None
    finally:
        gc.enable()


def test_the_length_of_one_stream_is_known():
    assert len(make_loader(sharded(Plain), 3)) == 6
    assert len(make_loader(sharded(Plain), world_size=4)) == 5
    assert len(make_loader(sharded(Plain), drop_last=True)) == 5
    for unknown in (make_loader(OwnShards()), make_loader(ShardedIterable(iter([])))):
        with pytest.raises(TypeError):
            len(unknown)


def test_reading_in_the_training_process_does_not_change_its_generators():
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    list(make_loader(sharded(Plain)))
    list(make_loader(OwnShards()))
    assert (random.getstate(), str(np.random.get_state())) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_a_plain_data_loader_reads_every_sample_once():
    loader = torch.utils.data.DataLoader(ShardedIterable(range(10)), batch_size=None, num_workers=2)
    assert sorted(loader) == list(range(10))


def test_an_endless_stream_is_counted_in_epochs_and_not_restarted():
    class Endless(Seeking):
        def __init__(self):
            super().__init__(10**9)

        __len__ = None

    iterator = EpochIterator(make_loader(ShardedIterable(Endless())), length=3)
    numbers = [[row[0] for row in batch] for batch in read(iterator, 7)]
    assert list(chain(*numbers)) == list(range(28))
    assert (iterator.epoch, iterator.position) == (2, 1)
    fresh = EpochIterator(make_loader(ShardedIterable(Endless()), 2), length=3)
    fresh.load_state_dict(iterator.state_dict())
    assert (fresh.epoch, fresh.position) == (2, 1)
    assert next(fresh)[:, 0].tolist() == [28, 29, 30, 31]


def test_a_stream_that_ends_inside_a_counted_epoch_restarts_within_it():
    class Listener:
        heard = []

        def after_epoch(self):
            self.heard.append("after")

        before_epoch = after_epoch

    whole = EpochIterator(make_loader(OwnShards()), length=8, listener=Listener())
    places, batches = [], []
    for _ in range(18):
        batches.append(next(whole).tolist())
        places.append((whole.epoch, whole.position))
        if whole.position == 8:
            whole.next_epoch()
    assert places == [(number // 8, number % 8 + 1) for number in range(18)]
    assert Listener.heard == []
    assert batches[0] != batches[6]  # the second pass has the same numbers and other draws
    assert [row[0] for row in batches[0]] == [row[0] for row in batches[6]]
    before = EpochIterator(make_loader(OwnShards()), length=8)
    read(before, 15)
    after = EpochIterator(make_loader(OwnShards()), length=8)
    after.load_state_dict(before.state_dict())
    assert read(after, 3) == batches[15:]
    assert (after.epoch, after.position) == (2, 2)


# ---------------------------------------------------------------------------- from a config

DATASET_REGISTRY.register(OwnShards)


@DATASET_REGISTRY.register()
def one_stream(size: int = SIZE):
    return ShardedIterable(range(size))


def make_cfg(name="one_stream", **loader):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.SEED = 5
    cfg.DATASETS.TRAIN = [name]
    cfg.DATALOADER.BATCH_SIZE = BATCH
    for key, value in loader.items():
        cfg.DATALOADER[key] = value
    return cfg


@pytest.mark.parametrize("workers", [0, 2])
def test_a_config_builds_a_loader_that_can_be_resumed(workers):
    def iterator():
        return EpochIterator(build_train_loader(make_cfg(NUM_WORKERS=workers)))

    whole, before, after = iterator(), iterator(), iterator()
    list(islice(before, 2))
    after.load_state_dict(before.state_dict())
    assert read(after, 5) == read(whole, 7)[2:]


def test_a_set_that_may_not_split_itself_causes_a_warning(caplog):
    class Naive(IterableDataset):
        def __iter__(self):
            return iter(range(SIZE))

    DATASET_REGISTRY.register(Naive)
    with caplog.at_level(logging.WARNING, "hookline"):
        build_train_loader(make_cfg("OwnShards", NUM_WORKERS=2))
        build_train_loader(make_cfg("one_stream", NUM_WORKERS=2))
        build_train_loader(make_cfg("Naive"))
        assert not caplog.text
        build_train_loader(make_cfg("Naive", NUM_WORKERS=2))
    assert "every sample is seen 2 times" in caplog.text


def test_ranks_that_might_end_at_different_steps_need_a_length(monkeypatch):
    monkeypatch.setattr("hookline.engine.comm.get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"DATALOADER\.ITERS_PER_EPOCH.*ShardedIterable"):
        build_train_loader(make_cfg("OwnShards"))
    build_train_loader(make_cfg("OwnShards", ITERS_PER_EPOCH=5))
    build_train_loader(make_cfg("one_stream"))


@pytest.mark.parametrize(("name", "workers"), [("one_stream", 0), ("one_stream", 2), ("OwnShards", 2)])
def test_a_limit_ends_each_pass_early_and_a_resume_counts_it(name, workers):
    def limited():
        return EpochIterator(build_train_loader(make_cfg(name, LIMIT_TRAIN_BATCHES=2, NUM_WORKERS=workers)))

    whole = limited()
    batches = [next(whole) for _ in range(5)]
    assert (whole.epoch, whole.position) == (2, 1)
    for stop in (1, 2, 3):
        killed, resumed = limited(), limited()
        for _ in range(stop):
            next(killed)
        resumed.load_state_dict(killed.state_dict())
        assert [str(next(resumed)) for _ in batches[stop:]] == [str(batch) for batch in batches[stop:]]
        assert (resumed.epoch, resumed.position) == (2, 1)


def test_a_limit_is_the_length_of_data_that_has_none():
    cfg = make_cfg("OwnShards", LIMIT_TRAIN_BATCHES=3, LIMIT_TEST_BATCHES=2, NUM_WORKERS=2)
    assert len(build_train_loader(cfg)) == 3
    assert len(list(build_test_loader(cfg, "one_stream"))) == 2


def test_overfitting_on_a_stream_is_refused():
    with pytest.raises(ConfigError, match=r"OVERFIT_BATCHES: .* is iterable; put its first samples into a list"):
        build_train_loader(make_cfg("one_stream", OVERFIT_BATCHES=2))


def test_ranks_evaluate_every_sample_of_a_stream_once():
    cfg = make_cfg(TEST_BATCH_SIZE=4)
    cfg.DATASETS.TEST = ["one_stream"]
    assert torch.cat(list(build_test_loader(cfg, "one_stream"))).tolist() == list(range(SIZE))
