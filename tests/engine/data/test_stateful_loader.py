"""Loaders with ``state_dict``, such as torchdata's."""

from itertools import chain, islice

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.engine.data import EpochIterator
from hookline.engine.data.batches import CudaPrefetcher

torchdata = pytest.importorskip("torchdata.stateful_dataloader")

SIZE, BATCH, PER_EPOCH = 10, 3, 4


class Numbers(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Stream(IterableDataset):
    """Has a position; restarts after its end."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < SIZE:
            self.next += 1
            yield torch.tensor([float(self.next)])
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def shuffled(workers=0, **options):
    return torchdata.StatefulDataLoader(Numbers(), BATCH, shuffle=True, num_workers=workers, **options)


def distributed(workers=0):
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=0, seed=3)
    return torchdata.StatefulDataLoader(Numbers(), 2, sampler=sampler, num_workers=workers)


def stream(workers=0):
    return torchdata.StatefulDataLoader(Stream(), BATCH, num_workers=workers)


def take(iterator, number):
    return [batch.flatten().tolist() for batch in islice(iterator, number)]


@pytest.mark.parametrize("make", [shuffled, distributed, stream])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("killed_after", [0, 2, 4, 5])
def test_a_resume_continues_after_the_last_used_batch(make, workers, killed_after):
    torch.manual_seed(0)
    iterator = EpochIterator(make(workers))
    head = take(iterator, killed_after)
    state, rng = iterator.state_dict(), torch.get_rng_state()
    tail = take(iterator, 9 - killed_after)
    torch.manual_seed(99)
    fresh = EpochIterator(make(workers))
    assert fresh.load_state_dict(state)
    if fresh.begun:
        fresh.prepare()
    torch.set_rng_state(rng)
    assert take(fresh, 9 - killed_after) == tail
    assert (fresh.epoch, fresh.position) == (iterator.epoch, iterator.position)
    assert len(head) == killed_after


def test_a_skipped_epoch_is_not_continued():
    torch.manual_seed(0)
    iterator = EpochIterator(shuffled())
    take(iterator, 2)
    iterator.skip_epoch()
    state, rng = iterator.state_dict(), torch.get_rng_state()
    assert (state["epoch"], state["position"]) == (1, 0)
    iterator.next_epoch()
    tail = take(iterator, PER_EPOCH)
    fresh = EpochIterator(shuffled())
    fresh.load_state_dict(state)
    torch.set_rng_state(rng)
    assert take(fresh, PER_EPOCH) == tail
    assert sorted(chain(*tail)) == list(range(SIZE))


def test_another_number_of_workers_is_an_error_that_says_so():
    iterator = EpochIterator(shuffled(2))
    take(iterator, 2)
    fresh = EpochIterator(shuffled(1))
    fresh.load_state_dict(iterator.state_dict())
    with pytest.raises(ConfigError, match="number of workers"):
        next(fresh)


class Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, batch):
        return {"loss": torch.nn.functional.dropout(self.layer(batch)).square().mean()}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("killed_after", [1, 3, 4, 6])
def test_a_trainer_resumes_to_the_same_weights(workers, killed_after):
    def trainer():
        torch.manual_seed(0)
        model = Dropping()
        return SimpleTrainer(model, shuffled(workers), torch.optim.SGD(model.parameters(), lr=0.01))

    whole = trainer()
    whole.train(0, 11)
    before = trainer()
    before.train(0, killed_after)
    weights, state = before.model.state_dict(), before.state_dict()
    after = trainer()
    torch.manual_seed(99)
    after.model.load_state_dict(weights)
    after.load_state_dict(state)
    after.train(killed_after, 11)
    assert torch.equal(after.model.layer.weight, whole.model.layer.weight)


class Counting:
    """Does not read ahead, and reports its position."""

    num_workers = 1

    def __init__(self):
        self.read = 0

    def __iter__(self):
        for number in range(5):
            self.read = number + 1
            yield number

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        raise AssertionError


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_prefetched_batch_does_not_count_as_used():
    iterator = EpochIterator(Counting(), device=torch.device("cuda"))
    states = []
    for _ in range(5):
        next(iterator)
        states.append(iterator.state_dict()["loader"]["read"])
    assert states == [1, 2, 3, 4, 5]
    assert isinstance(iterator._iterator, CudaPrefetcher)
