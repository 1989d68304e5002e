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
    RepeatFactorTrainingSampler,
    SeededLoader,
    TrainingSampler,
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
    "repeated": lambda: RepeatFactorTrainingSampler([0.5, 1.7] * 11 + [1.0], seed=1),
}


def make_loader(workers=0, sampler="epochs", rank=0, world_size=1, seed=7):
    batches = GlobalBatchSampler(SAMPLERS[sampler](), BATCH, False, rank, world_size)
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


@pytest.mark.parametrize(("sampler", "killed_after"), [("epochs", PER_EPOCH), ("endless", 5)])
def test_a_resume_with_other_workers_reads_the_same_bytes(sampler, killed_after):
    whole = read(EpochIterator(make_loader(sampler=sampler), PER_EPOCH), 2 * PER_EPOCH)
    before, after = (EpochIterator(make_loader(workers, sampler=sampler), PER_EPOCH) for workers in (1, 0))
    assert read(before, killed_after) == whole[:killed_after]
    after.load_state_dict(before.state_dict())
    assert read(after, 2 * PER_EPOCH - killed_after) == whole[killed_after:]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_ranks_together_read_the_same_samples_also_after_a_resume_on_other_ranks(sampler):
    def rows(ranks, state=None):
        loaders = [make_loader(sampler=sampler, rank=rank, world_size=ranks) for rank in range(ranks)]
        iterators = [EpochIterator(loader, PER_EPOCH) for loader in loaders]
        for iterator in iterators:
            if state is not None:
                iterator.load_state_dict(state)
        # without the draws of the collate function, which depend on the rank's part
        parts = [[batch[:, :-1].tolist() for batch in islice(iterator, 8)] for iterator in iterators]
        return [list(chain(*step)) for step in zip(*parts, strict=True)], iterators[-1].state_dict()

    whole, state = rows(1)
    assert rows(2) == (whole, state)
    assert rows(3, state) == rows(1, state)


def test_epochs_places_and_seeds_draw_different_numbers():
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    first = torch.cat([*islice(EpochIterator(make_loader()), 2 * PER_EPOCH)])
    rows = torch.cat([first, *islice(make_loader(seed=8), PER_EPOCH)])
    for column in range(1, rows.shape[1] - 1):
        assert len(set(rows[:, column].tolist())) == len(rows)
    assert before == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())


class Quiet(Augmented):
    deterministic = True


def test_only_data_sets_known_to_be_deterministic_are_unseeded():
    arrays = Subset(TensorDataset(torch.zeros(3)), [1])
    for dataset in (ArrayDataset(torch.zeros(3)), [1, 2], Quiet(), ConcatDataset([Quiet(), arrays])):
        assert is_deterministic(dataset, default_collate)
        assert not is_deterministic(dataset, lambda batch: batch)
    assert not is_deterministic(ConcatDataset([Quiet(), Subset(Augmented(), [1])]))
