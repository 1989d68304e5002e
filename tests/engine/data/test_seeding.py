"""Random draws of samples depend on their position only: not on kills, workers, ranks or other draws of the process."""

import json
import os
import random
from itertools import chain, islice
from pathlib import Path
from types import GeneratorType

import numpy as np
import pytest
import torch
from forker import forker
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from hookline.config import ConfigError, get_cfg
from hookline.engine import SimpleTrainer
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
    build_train_loader,
    is_deterministic,
    seed_generators,
    stream_key,
)
from hookline.engine.data.loader import iterate

SIZE, BATCH = 23, 4
PER_EPOCH = 6


class Augmented(Dataset):
    """Draws from all three generators, a different number of times for each sample."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        draws = [random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item(), random.gauss(0, 1)]
        for _ in range(index % 3):
            random.random(), np.random.randn(), torch.randn(())
        return torch.tensor([index, *draws, random.random()], dtype=torch.float64)


class Mixing(Augmented):
    """Draws in its collate function too, as mixup does."""

    @staticmethod
    def collate_fn(samples):
        weight = random.random() + np.random.rand() + torch.rand(()).item()
        return torch.stack(samples) * weight


class InBatches(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


SAMPLERS = {
    "epochs": lambda: EpochSampler(SIZE, seed=1),
    "endless": lambda: TrainingSampler(SIZE, seed=1, rank=0, world_size=1),
    "subset": lambda: RandomSubsetTrainingSampler(SIZE, 0.5, seed_shuffle=1, seed_subset=2, rank=0, world_size=1),
    "repeated": lambda: RepeatFactorTrainingSampler([0.5, 1.7] * 11 + [1.0], seed=1, rank=0, world_size=1),
}


def make_loader(workers=0, dataset=None, sampler="epochs", rank=0, world_size=1, batch_size=BATCH, drop_last=False):
    dataset = dataset or Augmented()
    batches = GlobalBatchSampler(SAMPLERS[sampler](), batch_size, drop_last, rank, world_size, placed=True)
    return SeededLoader(
        dataset,
        seed=7,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=getattr(dataset, "collate_fn", None),
        persistent_workers=workers > 0,
        generator=torch.Generator(),
    )


def read(iterator, number):
    return [batch.numpy().tobytes() for batch in islice(iterator, number)]


def scramble():
    """Like a new process, whose generators have another state."""
    random.seed()
    np.random.seed()
    torch.seed()


@pytest.fixture(autouse=True)
def _scrambled():
    scramble()


@pytest.mark.parametrize("dataset", [Augmented, Mixing, InBatches])
def test_samples_draw_the_same_numbers_with_any_number_of_workers(dataset):
    expected = read(EpochIterator(make_loader(0, dataset())), 2 * PER_EPOCH)
    for workers in (0, 1, 2):
        scramble()
        assert read(EpochIterator(make_loader(workers, dataset())), 2 * PER_EPOCH) == expected


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("killed_after", [1, PER_EPOCH - 1, PER_EPOCH, PER_EPOCH + 2])
def test_a_resume_with_other_workers_reads_the_same_bytes(sampler, killed_after):
    whole = read(EpochIterator(make_loader(0, sampler=sampler), PER_EPOCH), 3 * PER_EPOCH)
    before = EpochIterator(make_loader(2, sampler=sampler), PER_EPOCH)
    assert read(before, killed_after) == whole[:killed_after]
    after = EpochIterator(make_loader(1 - killed_after % 2, sampler=sampler), PER_EPOCH)
    assert after.load_state_dict(before.state_dict())
    assert read(after, 3 * PER_EPOCH - killed_after) == whole[killed_after:]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_read_the_same_bytes(sampler, world_size):
    def rows(**kwargs):
        return [batch.tolist() for batch in islice(EpochIterator(make_loader(sampler=sampler, **kwargs)), 8)]

    ranks = [rows(rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == rows()


def test_a_resume_on_another_number_of_ranks_reads_the_same_samples():
    whole = [batch.tolist() for batch in islice(EpochIterator(make_loader()), PER_EPOCH)]
    before = EpochIterator(make_loader(rank=1, world_size=2))
    list(islice(before, 2))
    ranks = []
    for rank in range(3):
        after = EpochIterator(make_loader(rank=rank, world_size=3))
        after.load_state_dict(before.state_dict())
        ranks.append([batch.tolist() for batch in islice(after, PER_EPOCH - 2)])
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == whole[2:]


def test_epochs_and_places_draw_different_numbers():
    iterator = EpochIterator(make_loader(2))
    rows = torch.cat(list(islice(iterator, 2 * PER_EPOCH)))
    for column in range(1, rows.shape[1]):
        assert len(set(rows[:, column].tolist())) == 2 * SIZE


def test_a_repeated_sample_is_augmented_differently():
    rows = torch.cat(list(islice(EpochIterator(make_loader(sampler="repeated")), 12))).tolist()
    assert len({row[0] for row in rows}) < len({tuple(row) for row in rows}) == len(rows)


def test_reading_in_the_training_process_does_not_change_its_generators():
    loader = iter(make_loader(0, Mixing()))
    np.random.randn()  # the generator caches a second number
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    list(loader)
    assert random.getstate() == states[0]
    assert str(np.random.get_state()) == str(states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_a_failing_sample_does_not_change_the_generators():
    class Failing(Augmented):
        def __getitem__(self, index):
            raise OSError("no such file")

    state = torch.get_rng_state()
    with pytest.raises(OSError, match="no such file"):
        next(iter(make_loader(0, Failing())))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("change", [(7, 0, 1), (7, 1, 0), (8, 0, 0)], ids=["draw", "epoch", "seed"])
def test_the_seed_depends_on_every_number_of_the_key(change):
    def draw(*numbers, place=5):
        seed_generators(stream_key(*numbers), place)
        return random.random(), np.random.rand(), torch.rand(()).item()

    ours = draw(7, 0, 0)
    assert ours == draw(7, 0, 0)
    assert all(a != b for a, b in zip(ours, draw(*change), strict=True))
    assert all(a != b for a, b in zip(ours, draw(7, 0, 0, place=6), strict=True))


def test_the_loader_exposes_the_original_data_set_and_collate_function():
    dataset = Mixing()
    loader = make_loader(0, dataset)
    iter(loader)
    assert loader.dataset is dataset
    assert loader.collate_fn is Mixing.collate_fn
    assert isinstance(loader, DataLoader)


def test_indices_stay_a_list_for_a_data_set_that_reads_batches():
    seen = []

    class Noting(InBatches):
        def __getitems__(self, indices):
            seen.append((indices[0], list(indices), torch.as_tensor(indices).tolist()))
            return super().__getitems__(indices)

    next(iter(make_loader(0, Noting())))
    first, indices, tensor = seen[0]
    assert first == indices[0]
    assert indices == tensor


def test_a_part_of_a_data_set_of_samples_is_seeded_sample_by_sample():
    indices = list(range(SIZE))
    assert read(make_loader(0, Subset(Augmented(), indices)), 6) == read(make_loader(0), 6)


def test_a_loader_of_parts_chosen_by_hand_seeds_too():
    def rows(start=0, **kwargs):
        loader = build_batch_data_loader(
            Augmented(), TrainingSampler(SIZE, seed=3), 4, collate_fn=default_collate, seed=1, **kwargs
        )
        iterator = EpochIterator(loader, PER_EPOCH)
        iterator.load_state_dict({"epoch": 0, "position": start, "samples": 4 * start})
        return read(iterator, 12 - start)

    assert rows() == rows(num_workers=2)
    assert rows(start=5, num_workers=2) == rows()[5:]


class Quiet(Dataset):
    deterministic = True

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index


class Noisy(Quiet):
    def __getitem__(self, index):
        return index + random.random()


class NoisyArrays(ArrayDataset):
    def __getitems__(self, indices):
        return tuple(batch + torch.rand(()) for batch in super().__getitems__(indices))


class SaysSo(NoisyArrays):
    deterministic = True


def mixup(batch):
    return batch


@pytest.mark.parametrize(
    ("dataset", "known"),
    [
        (ArrayDataset(torch.zeros(3)), True),
        (TensorDataset(torch.zeros(3)), True),
        ([1, 2], True),
        (Quiet(), True),
        (Subset(Quiet(), [1]), True),
        (ConcatDataset([Quiet(), TensorDataset(torch.zeros(3))]), True),
        (Augmented(), False),
        (Noisy(), False),
        (NoisyArrays(torch.zeros(3)), False),
        (SaysSo(torch.zeros(3)), True),
        (ConcatDataset([Quiet(), Augmented()]), False),
        (Subset(Augmented(), [1]), False),
    ],
)
def test_only_data_sets_known_to_be_deterministic_are_unseeded(dataset, known):
    assert is_deterministic(dataset) is known


def test_a_custom_collate_function_may_draw():
    dataset = ArrayDataset(torch.zeros(3))
    assert is_deterministic(dataset, dataset.collate_fn)
    assert is_deterministic(Quiet(), default_collate)
    assert not is_deterministic(dataset, mixup)


def test_loaders_of_arrays_are_read_by_the_plain_loop():
    cfg = get_cfg()
    cfg.merge_from_list(["DATASETS.TRAIN", ["synthetic"], "MODEL.DEVICE", "cpu", "SEED", 1])
    loader = build_train_loader(cfg)
    assert loader.seed is None
    assert type(next(iter(loader.batch_sampler))) is list
    assert isinstance(iterate(loader), GeneratorType)


class Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(7, 1, dtype=torch.float64)

    def forward(self, batch):
        return {"loss": torch.nn.functional.dropout(self.layer(batch)).square().mean()}


@pytest.mark.parametrize("killed_after", [4, PER_EPOCH, PER_EPOCH + 2])
def test_a_run_with_dropout_and_accumulation_does_not_depend_on_workers(killed_after):
    def trainer(workers):
        torch.manual_seed(0)
        model = Dropping()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        return SimpleTrainer(model, make_loader(workers, Mixing()), optimizer, accumulation_steps=2)

    whole, before, after = trainer(0), trainer(2), trainer(1)
    for run, end in ((whole, 14), (before, killed_after)):
        torch.manual_seed(1)
        run.train(0, end)
    weights, state = before.model.state_dict(), before.state_dict()
    scramble()
    after.model.load_state_dict(weights)
    after.load_state_dict(state)
    after.train(killed_after, 14)
    assert torch.equal(after.model.layer.weight, whole.model.layer.weight)


SCRIPT = """
import json, sys
from test_seeding import EpochIterator, make_loader, read, torch, PER_EPOCH
workers, number, file, state = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
iterator = EpochIterator(make_loader(workers))
if state:
    assert iterator.load_state_dict(state)
with open(file, "ab") as out:
    out.write(b"".join(read(iterator, number)))
print(json.dumps(iterator.state_dict()))
"""


def test_successive_processes_read_the_samples_of_one_process(tmp_path):
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parents[1] / 'helpers'}"}
    (tmp_path / "part.py").write_text(SCRIPT)
    file, state = tmp_path / "bytes", "null"
    for workers, number in ((2, 5), (0, 7)):
        command = [tmp_path / "part.py", workers, number, file, state]
        process = forker.start(command, tmp_path, environment, apart=True)
        state, err = process.communicate(250)
        assert process.returncode == 0, err
    assert json.loads(state)["epoch"] == 2
    assert file.read_bytes() == b"".join(read(EpochIterator(make_loader()), 12))


class DrawsOnce(Dataset):
    """Draws a number for one sample only."""

    def __init__(self, draw):
        self.draw, self.reads = draw, []

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self.reads.append(index)
        return float(self.draw()) if index == 9 else 0.0


@pytest.mark.parametrize(
    ("draw", "again"), [(random.random, BATCH), (np.random.rand, BATCH), (lambda: torch.rand(()).item(), 0)]
)
def test_only_a_batch_that_draws_for_the_first_time_is_read_twice(draw, again):
    dataset = DrawsOnce(draw)
    place = list(EpochSampler(SIZE, seed=1)).index(9)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = [random.random(), np.random.rand(), torch.rand(()).item()]
    random.seed(3), np.random.seed(3)
    loader = make_loader(dataset=dataset)
    batches = iter(loader)
    torch.manual_seed(3)
    read = torch.cat(list(batches))
    assert [random.random(), np.random.rand(), torch.rand(()).item()] == expected
    twice = {index for index in dataset.reads if dataset.reads.count(index) > 1}
    assert len(dataset.reads) == SIZE + again
    assert (9 in twice) == bool(again)
    assert len(twice) == again
    seed_generators(stream_key(7, 0, 0), place)
    assert read[place].item() == draw()
    assert read.count_nonzero() == 1


class LeavesState(Dataset):
    """Draws from torch's generator, whose state is the same afterwards."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with torch.random.fork_rng(devices=[]):
            return torch.rand(1).item(), torch.initial_seed()


def test_a_data_set_that_leaves_torchs_state_as_it_was_draws_a_number_per_sample():
    one, other = (
        [
            number
            for batch in SeededLoader(LeavesState(), seed=3, batch_size=4, num_workers=workers)
            for number in batch[0]
        ]
        for workers in (0, 1)
    )
    assert len(set(map(float, one))) == 8
    assert one == other


class Normal(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return np.random.randn()


def read_one():
    return next(iter(SeededLoader(Normal(), seed=3, num_workers=0))).item()


def test_a_normal_number_that_numpy_has_kept_is_not_drawn_by_a_data_set():
    np.random.seed(0)
    expected = read_one()
    np.random.seed(1)
    np.random.randn()  # numpy keeps a second one
    kept = np.random.get_state()
    assert read_one() == expected
    now = np.random.get_state()
    assert (now[1] == kept[1]).all()
    assert now[2:] == kept[2:]


def test_a_kept_normal_number_that_was_drawn_since_is_gone():
    np.random.seed(1)
    np.random.randn()
    read_one()
    np.random.randn()  # the kept one, which changes nothing else
    drawn = np.random.get_state()
    read_one()
    assert np.random.get_state()[2:] == drawn[2:]


def test_another_generator_of_numpy_is_refused():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        with pytest.raises(ConfigError, match=r"must be MT19937, as usual, .*not PCG64"):
            read_one()
    finally:
        np.random.set_bit_generator(before)
