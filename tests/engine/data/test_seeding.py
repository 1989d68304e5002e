"""Random draws of samples depend on their position only: not on kills, workers, ranks or other draws of the process."""

import random
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from hookline.engine.data import (
    ArrayDataset,
    EpochIterator,
    EpochSampler,
    GlobalBatchSampler,
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    SeededLoader,
    TrainingSampler,
    build_batch_data_loader,
)
from hookline.engine.data.seeding import is_deterministic

SIZE, BATCH = 23, 4
PER_EPOCH = 6


class Augmented(Dataset):
    """Draws from all three generators, a different number of times for each sample; collates as mixup does."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        draws = [random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item(), random.gauss(0, 1)]
        for _ in range(index % 3):
            random.random(), np.random.randn(), torch.randn(())
        return torch.tensor([index, *draws, random.random()], dtype=torch.float64)

    @staticmethod
    def collate_fn(samples):
        weight = random.random() + np.random.rand() + torch.rand(()).item()
        return torch.cat([torch.stack(samples), torch.full((len(samples), 1), weight)], 1)


SAMPLERS = {
    "epochs": lambda: EpochSampler(SIZE, seed=1),
    "endless": lambda: TrainingSampler(SIZE, seed=1),
    "subset": lambda: RandomSubsetTrainingSampler(SIZE, 0.5, seed_shuffle=1, seed_subset=2),
    "repeated": lambda: RepeatFactorTrainingSampler([0.5, 1.7] * 11 + [1.0], seed=1),
}


def make_loader(workers=0, sampler="epochs", rank=0, world_size=1, seed=7):
    batches = GlobalBatchSampler(SAMPLERS[sampler](), BATCH, False, rank, world_size, placed=True)
    data, options = Augmented(), {"num_workers": workers, "generator": torch.Generator()}
    return SeededLoader(data, seed=seed, batch_sampler=batches, collate_fn=data.collate_fn, **options)


def read(iterator, number):
    return [batch.numpy().tobytes() for batch in islice(iterator, number)]


@pytest.fixture(autouse=True)
def _scrambled():
    """Like a new process, whose generators have another state."""
    random.seed()
    np.random.seed()
    torch.seed()


@pytest.mark.parametrize(
    ("sampler", "killed_after"),
    [("epochs", 1), ("epochs", PER_EPOCH), ("endless", 5), ("subset", 8), ("repeated", 8)],
)
def test_a_resume_with_other_workers_reads_the_same_bytes(sampler, killed_after):
    whole = read(EpochIterator(make_loader(sampler=sampler), PER_EPOCH), 2 * PER_EPOCH)
    before = EpochIterator(make_loader(killed_after % 2, sampler=sampler), PER_EPOCH)
    assert read(before, killed_after) == whole[:killed_after]
    after = EpochIterator(make_loader(1 - killed_after % 2, sampler=sampler), PER_EPOCH)
    assert after.load_state_dict(before.state_dict())
    assert read(after, 2 * PER_EPOCH - killed_after) == whole[killed_after:]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_ranks_together_read_the_same_samples_also_after_a_resume_on_other_ranks(sampler):
    def rows(ranks, state=None):
        iterators = [
            EpochIterator(make_loader(sampler=sampler, rank=rank, world_size=ranks), PER_EPOCH) for rank in range(ranks)
        ]
        if state:
            for iterator in iterators:
                iterator.load_state_dict(state)
        # without the draws of the collate function, which depend on the rank's part
        parts = [[batch[:, :-1].tolist() for batch in islice(iterator, 8)] for iterator in iterators]
        return [list(chain(*step)) for step in zip(*parts, strict=True)], iterators[-1].state_dict()

    whole, state = rows(1)
    assert rows(2) == (whole, state)
    assert rows(3, state) == rows(1, state)


@pytest.mark.parametrize(("sampler", "epochs"), [("epochs", 2), ("repeated", 1)])
def test_epochs_places_and_seeds_draw_different_numbers(sampler, epochs):
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    first = torch.cat([*islice(EpochIterator(make_loader(sampler=sampler)), epochs * PER_EPOCH)])
    rows = torch.cat([first, *islice(make_loader(sampler=sampler, seed=8), PER_EPOCH)])
    for column in range(1, rows.shape[1] - 1):
        assert len(set(rows[:, column].tolist())) == len(rows)
    assert before == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())


def test_a_loader_of_parts_chosen_by_hand_seeds_too():
    def rows(start=0, **options):
        data, sampler = Subset(Augmented(), range(SIZE)), TrainingSampler(SIZE, seed=3)
        loader = build_batch_data_loader(data, sampler, 4, collate_fn=default_collate, seed=1, **options)
        assert (loader.dataset, loader.collate_fn) == (data, default_collate)
        iterator = EpochIterator(loader, PER_EPOCH)
        iterator.load_state_dict({"epoch": 0, "position": start, "samples": 4 * start})
        return read(iterator, 8 - start)

    assert rows(start=5, num_workers=1) == rows()[5:]


class Quiet(Augmented):
    deterministic = True


@pytest.mark.parametrize(
    ("dataset", "known"),
    [
        (ArrayDataset(torch.zeros(3)), True),
        ([1, 2], True),
        (Quiet(), True),
        (ConcatDataset([Quiet(), Subset(TensorDataset(torch.zeros(3)), [1])]), True),
        (ConcatDataset([Quiet(), Subset(Augmented(), [1])]), False),
    ],
)
def test_only_data_sets_known_to_be_deterministic_are_unseeded(dataset, known):
    assert is_deterministic(dataset) is known
    assert is_deterministic(dataset, default_collate) is known
    assert not is_deterministic(dataset, lambda batch: batch)


def forked_draw():
    with torch.random.fork_rng(devices=[]):  # leaves torch's state as it was
        return torch.rand(1).item()


class Drawing(Dataset):
    """One drawn number per sample."""

    def __init__(self, draw, only=None):
        self.draw, self.only = draw, only

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return float(self.draw()) if self.only in (None, index) else 0.0


def drawn(draw, workers=0, **options):
    loader = SeededLoader(Drawing(draw, **options), seed=3, batch_size=4, num_workers=workers)
    return torch.cat(list(loader)).tolist()


def test_a_data_set_that_leaves_torchs_state_as_it_was_draws_a_number_per_sample():
    assert len(set(drawn(forked_draw))) == 8
    assert drawn(forked_draw) == drawn(forked_draw, workers=1)


def test_a_normal_number_that_numpy_has_kept_is_not_drawn_by_a_data_set():
    np.random.seed(0)
    expected = drawn(np.random.randn)
    np.random.randn()  # numpy keeps a second one
    assert drawn(np.random.randn) == expected


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
def test_a_sample_that_alone_draws_gets_the_number_of_its_place(draw):
    assert drawn(draw, only=6) == [0] * 6 + [drawn(draw)[6], 0]
