"""Iterable data sets: batches that do not depend on ranks and workers, and exact resumes."""

import random
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hookline.config import ConfigError
from hookline.engine import comm
from hookline.engine.data import DATASET_REGISTRY, EpochIterator, ShardedIterable, build_test_loader, build_train_loader
from hookline.engine.data.stream import StreamLoader

from .test_build import make_cfg

SIZE, BATCH = 23, 4


class Plain:
    """Yields numbers and random draws, without a position. Counts the samples that are read."""

    asked = 0

    def __iter__(self):
        offset = random.random()
        for number in range(SIZE):
            self.asked += 1
            yield [float(number), offset, random.random(), np.random.randn(), torch.rand(()).item()]

    def __len__(self):
        return SIZE


class Seeking(Plain):
    """Can start at any position."""

    deterministic = True

    def set_epoch(self, epoch, start=0):
        self.epoch, self.start = epoch, start

    def __iter__(self):
        for number in range(self.start, SIZE):
            self.asked += 1
            yield [float(number + 100 * self.epoch)]


class Remembering(Plain):
    """Shuffles with a buffer, and has ``state_dict``."""

    buffer, next = (), 0

    def __iter__(self):
        while self.next < SIZE or self.buffer:
            while len(self.buffer) < 5 and self.next < SIZE:
                self.asked += 1
                self.buffer = [*self.buffer, self.next]
                self.next += 1
            yield [float(self.buffer.pop(random.randrange(len(self.buffer)))), np.random.rand()]
        self.buffer, self.next = [], 0

    def state_dict(self):
        return {"buffer": list(self.buffer), "next": self.next}

    def load_state_dict(self, state):
        self.buffer, self.next = list(state["buffer"]), state["next"]


def with_draws(sample):
    return [*sample, random.random(), np.random.randn(), torch.rand(()).item()]


def sharded(source):
    return ShardedIterable(source(), with_draws)


class OwnShards(IterableDataset):
    """Splits its numbers between ranks and workers."""

    shares_itself_out = True

    def __iter__(self):
        info = get_worker_info()
        for number in range(0, SIZE) if info is None else range(info.id, SIZE, info.num_workers):
            yield [float(number), random.random(), np.random.randn(), torch.rand(()).item()]


def collate(samples):
    return torch.cat([torch.tensor(samples, dtype=torch.float64), torch.rand(len(samples), 1)], 1)


def make_loader(dataset, workers=0, batch_size=BATCH, rank=0, world_size=1):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "get_data_rank", lambda: rank)
        patch.setattr(comm, "get_data_size", lambda: world_size)
        return StreamLoader(dataset, batch_size, seed=7, num_workers=workers, collate_fn=collate)


def read(iterator, number):
    return [batch.tolist() for batch in islice(iterator, number)]


@pytest.fixture(autouse=True)
def _scrambled():
    """Like a new process, whose generators have another state."""
    random.seed()
    np.random.seed()
    torch.seed()


@pytest.mark.parametrize("source", [Plain, Seeking, pytest.param(Remembering, marks=pytest.mark.slow)])
def test_batches_do_not_depend_on_workers_ranks_and_kills(source):
    whole = read(EpochIterator(make_loader(sharded(source))), 13)
    assert sorted(row[0] % 100 for batch in whole[:6] for row in batch) == list(range(SIZE))
    assert not {row[1] for row in chain(*whole[:6])} & {row[1] for row in chain(*whole[6:12])}  # other draws
    for killed_after, before, between, after in ((6, 2, 0, 0), (8, 0, 2, 2)):
        iterator = EpochIterator(make_loader(sharded(source), before))
        assert read(iterator, killed_after) == whole[:killed_after]
        state = iterator.state_dict()
        for workers in (between, after):  # a loaded position is saved unchanged before the first batch
            iterator = EpochIterator(make_loader(sharded(source), workers))
            iterator.load_state_dict(state)
            state = iterator.state_dict()
        assert read(iterator, 13 - killed_after) == whole[killed_after:]
    ranks = [read(EpochIterator(make_loader(sharded(source), rank=rank, world_size=3)), 12) for rank in range(3)]
    together = [list(chain(*parts)) for parts in zip(*ranks, strict=True)]
    # without the draws of the collate function, which depend on the rank's part
    assert [[row[:-1] for row in batch] for batch in together] == [[row[:-1] for row in batch] for batch in whole[:12]]


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


@pytest.mark.parametrize(("source", "read_again"), [(Remembering, 0), (Plain, 12)])
def test_only_a_set_without_a_state_is_read_again_with_a_warning(source, read_again, log):
    iterator = EpochIterator(make_loader(ShardedIterable(source())))
    list(islice(iterator, 3))
    data, before = source(), torch.get_rng_state()
    fresh = EpochIterator(make_loader(ShardedIterable(data)))
    fresh.load_state_dict(iterator.state_dict())
    next(fresh)
    assert data.asked <= read_again + 2 * BATCH
    assert torch.equal(before, torch.get_rng_state())
    assert ("12 samples are read and discarded" in log.text) == bool(read_again)


DATASET_REGISTRY.register(OwnShards)


@DATASET_REGISTRY.register()
def one_stream():
    return ShardedIterable(range(SIZE))


@DATASET_REGISTRY.register()
class Naive(OwnShards):
    shares_itself_out = False


def test_streams_that_cannot_be_read_as_asked_are_refused(monkeypatch):
    for name, options, named in (
        ("Naive", {"NUM_WORKERS": 2}, "shares_itself_out"),
        ("one_stream", {"OVERFIT_BATCHES": 2}, "OVERFIT_BATCHES"),
    ):
        with pytest.raises(ConfigError, match=named):
            build_train_loader(make_cfg([name], **options))
    build_train_loader(make_cfg(["Naive"], NUM_WORKERS=1))
    # Ranks that might end at different steps need a length.
    monkeypatch.setattr("hookline.engine.comm.get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="ITERS_PER_EPOCH"):
        build_train_loader(make_cfg(["OwnShards"]))
    build_train_loader(make_cfg(["OwnShards"], ITERS_PER_EPOCH=5))
    build_train_loader(make_cfg(["one_stream"]))


def test_a_set_that_splits_itself_between_workers_is_read_once():
    epoch = list(build_train_loader(make_cfg(["OwnShards"], NUM_WORKERS=2)))
    assert sorted(torch.cat([batch[0] for batch in epoch]).tolist()) == list(range(SIZE))
    assert len({float(row) for batch in epoch for row in batch[1]}) == SIZE  # random numbers


@pytest.mark.parametrize(
    ("killed_after", "workers"),
    [(2, 2), (3, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((6, 2), (3, 3)))],
)
def test_a_set_that_splits_itself_is_resumed_with_the_same_workers(killed_after, workers, log):
    killed, same = (EpochIterator(build_train_loader(make_cfg(["OwnShards"], NUM_WORKERS=2))) for _ in range(2))
    other = EpochIterator(build_train_loader(make_cfg(["OwnShards"], NUM_WORKERS=workers)))
    batches = [str(next(killed)) for _ in range(killed_after)]
    state = killed.state_dict()
    rest = [str(next(killed)) for _ in range(8)]
    if workers == 2:
        same.load_state_dict(state)
        assert [str(next(same)) for _ in rest] == rest
    else:
        other.load_state_dict(state)
        next(other)
        assert "its epoch starts again" in log.text
    assert len({*batches, *rest}) == len(batches) + 8


@pytest.mark.parametrize(("name", "stop", "workers"), [("one_stream", 1, 0), ("OwnShards", 2, 0), ("OwnShards", 3, 2)])
def test_a_limit_ends_each_pass_early_and_a_resume_counts_it(name, stop, workers):
    cfg = make_cfg([name], LIMIT_TRAIN_BATCHES=2, LIMIT_TEST_BATCHES=2, NUM_WORKERS=workers)
    assert len(build_train_loader(cfg)) == len(list(build_test_loader(cfg, "one_stream"))) == 2
    whole, killed, resumed = (EpochIterator(build_train_loader(cfg)) for _ in range(3))
    batches = [str(next(whole)) for _ in range(5)]
    list(islice(killed, stop))
    resumed.load_state_dict(killed.state_dict())
    assert [str(next(resumed)) for _ in batches[stop:]] == batches[stop:]
    assert (whole.epoch, whole.position) == (resumed.epoch, resumed.position) == (2, 1)
