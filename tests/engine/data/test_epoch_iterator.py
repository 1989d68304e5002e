from functools import partial
from itertools import islice

import pytest
import torch
from small_runs import Killed
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler, Subset, TensorDataset

from hookline.config import ConfigError
from hookline.engine import Trainer
from hookline.engine.data import (
    ArrayDataset,
    EpochIterator,
    EpochSampler,
    GlobalBatchSampler,
    MapDataset,
    TrainingSampler,
)
from hookline.engine.data.loader import LimitedLoader
from hookline.hooks import CallbackHook


def loader(size=10, batch_size=3, workers=0, sampler=EpochSampler, **options):
    dataset = ArrayDataset(torch.arange(size))
    batches = GlobalBatchSampler(sampler(size, seed=1), batch_size, **options)
    return DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate_fn, num_workers=workers)


def take(iterator, number):
    return [batch[0].tolist() for batch in islice(iterator, number)]


def flat(batches):
    return [index for batch in batches for index in batch]


class Noting(list):
    """An iterable of two batches, of a length that is not known. Notes the calls of ``set_epoch`` and its ends."""

    __len__ = None

    def __iter__(self):
        yield from "ab"
        self.append("end")  # here torch's RandomSampler draws once more

    def set_epoch(self, epoch):
        self.append(epoch)


def test_a_loader_restarts_at_its_end_and_epochs_are_counted():
    noted = Noting()
    iterator = EpochIterator(noted)
    places = [(next(iterator), iterator.epoch) for _ in range(5)]
    assert places == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]
    assert noted == [0, "end", 1, "end", 2]


def test_empty_loaders_and_exhausted_generators_are_errors():
    for empty in ([], DataLoader(TensorDataset(torch.zeros(0)))):
        with pytest.raises(ValueError, match="empty"):
            EpochIterator(empty)
    iterator = EpochIterator(i for i in range(2))
    list(islice(iterator, 2))
    with pytest.raises(RuntimeError, match="generator"):
        next(iterator)


FORMS = {
    "whole": lambda workers: EpochIterator(loader(workers=workers)),
    "limited": lambda workers: EpochIterator(LimitedLoader(loader(workers=workers), 2)),
    "shorter": lambda workers: EpochIterator(loader(workers=workers), length=3),
    "endless": lambda workers: EpochIterator(loader(40, workers=workers, sampler=TrainingSampler), length=3),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("number", "workers"), [(0, 0), (1, 2), (3, 0), (4, 0), (6, 0)])
def test_a_loaded_position_continues_with_the_next_batch(form, number, workers):
    whole, full = FORMS[form](0), take(EpochIterator(loader()), 8)
    batches = take(whole, 9)
    assert sorted(flat(full[:4])) == sorted(flat(full[4:])) == list(range(10))
    assert full[:4] != full[4:]
    length = {"whole": 4, "limited": 2, "shorter": 3}.get(form)
    assert length is None or batches[: 2 * length] == [*full[:length], *full[4 : 4 + length]]
    iterator, fresh = FORMS[form](workers), FORMS[form](0)  # batches that workers have read ahead do not count
    take(iterator, number)
    fresh.load_state_dict(iterator.state_dict())
    assert take(fresh, 9 - number) == batches[number:]
    assert (fresh.epoch, fresh.position) == (whole.epoch, whole.position)


@pytest.mark.parametrize(("size", "sizes"), [(12, (1, 12, 4)), (25, (3, 2, 5))])
def test_the_position_is_kept_over_repeated_changes_of_the_batch_size(size, sizes):
    seen, state = [], None
    for batch_size in sizes:
        iterator = EpochIterator(loader(size, batch_size))
        if state is not None:
            iterator.load_state_dict(state)
        if iterator.epoch == 0:
            seen += flat(take(iterator, 1))
        state = iterator.state_dict()
    while not iterator.ended and iterator.epoch == 0:
        seen += flat(take(iterator, 1))
    assert sorted(seen) == list(range(size))
    assert sorted(flat(take(iterator, -(-size // sizes[-1])))) == list(range(size))
    assert (iterator.epoch, iterator.ended) == (1, True)


def test_a_resume_reads_no_skipped_samples():
    class Counting(ArrayDataset):
        reads = []

        def __getitems__(self, indices):
            self.reads.append(indices)
            return super().__getitems__(indices)

    dataset = Counting(torch.arange(1000))
    batches = GlobalBatchSampler(EpochSampler(1000), 2)
    iterator = EpochIterator(DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate_fn))
    iterator.load_state_dict({"epoch": 3, "position": 400, "samples": 800})
    next(iterator)
    assert len(dataset.reads) == 1
    assert (iterator.epoch, iterator.position) == (3, 401)


def test_a_loader_without_a_position_restarts_its_epoch(log):
    iterator = EpochIterator(DataLoader(TensorDataset(torch.arange(3)), sampler=RandomSampler(range(3))))
    iterator.load_state_dict({"epoch": 5, "position": 2})
    assert "epoch 5 starts from its beginning" in log.text
    list(islice(iterator, 3))
    assert (iterator.epoch, iterator.position) == (5, 3)


def test_a_loader_of_torchdata_continues_after_the_last_used_batch():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = TensorDataset(torch.arange(10))
    iterator, fresh = (EpochIterator(stateful(data, 3, shuffle=True, num_workers=2)) for _ in range(2))
    list(islice(iterator, 5))
    state, rng = iterator.state_dict(), torch.get_rng_state()
    tail = str(list(islice(iterator, 5)))
    fresh.load_state_dict(state)
    fresh.prepare()
    torch.set_rng_state(rng)
    assert str(list(islice(fresh, 5))) == tail


class Changing(Dataset):
    """Samples of its size, the epoch that it was told, and their index."""

    size, epoch, length = 0.0, -1, 12

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([self.size, self.epoch, index, 0.0]), index % 3


def run(folder, data, before_epoch, kill=-1, resume=False, **keys):
    """Train for 14 iterations; return the samples of each step, with its epoch."""
    seen = []

    def note(trainer, batch):
        seen.append((trainer.iter, trainer.epoch, batch[0].tolist()))
        if trainer.iter == kill:
            raise Killed

    trainer = Trainer(
        nn.Linear(4, 3),
        data,
        loss=nn.CrossEntropyLoss(),
        length=14,
        seed=1,
        output_dir=folder,
        hooks=[CallbackHook(before_epoch=before_epoch, after_fetch=note)],
        config={"DATALOADER": {"BATCH_SIZE": 4, **keys}, "SOLVER.CHECKPOINT_PERIOD": 1, "LOG.WRITERS": []},
    )
    if kill < 0:
        trainer.train(resume=resume)
    else:
        with pytest.raises(Killed):
            trainer.train()
    return seen


@pytest.mark.parametrize(
    ("workers", "keys"),
    [
        (0, {}),
        (2, {}),
        pytest.param(2, {"SAMPLER_TRAIN": "TrainingSampler"}, marks=pytest.mark.slow),
        pytest.param(0, {"DROP_LAST": True}, marks=pytest.mark.slow),
    ],
)
def test_changes_of_the_data_set_in_before_epoch_reach_workers_and_a_resume(workers, keys, tmp_path):
    def change(trainer):
        data = trainer.data_loader.dataset
        data.size, data.length = float(trainer.epoch), 12 + 6 * trainer.epoch

    seen = run(tmp_path / "whole", Changing(), change, NUM_WORKERS=workers, **keys)
    for _, epoch, samples in seen:
        assert {(size, told) for size, told, *_ in samples} == {(epoch, epoch)}
    indices = [[sample[2] for _, at, samples in seen if at == epoch for sample in samples] for epoch in (0, 1)]
    if keys.get("SAMPLER_TRAIN"):
        assert [epoch for _, epoch, _ in seen] == [0] * 3 + [1] * 4 + [2] * 6 + [3]  # whole batches
        assert max(indices[0]) < 12 <= max(indices[1])
    else:
        assert sorted(indices[0]) == list(range(12))
        assert set(indices[1]) <= set(range(18))
        assert len(set(indices[1])) == (16 if keys else 18)
    run(tmp_path / "killed", Changing(), change, kill=10, **keys)  # in an epoch longer than the loader was built for
    assert run(tmp_path / "killed", Changing(), change, resume=True, NUM_WORKERS=workers, **keys) == seen[10:]


def test_parts_of_a_data_set_know_the_epoch_and_persistent_workers_the_length(tmp_path):
    def grow(trainer):
        data.length = 12 + 4 * trainer.epoch

    data = Changing()
    seen = run(tmp_path / "parts", ConcatDataset([data, MapDataset(Subset(Changing(), range(12)), tuple)]), grow)
    assert [epoch for _, epoch, _ in seen] == [0] * 6 + [1] * 7 + [2]
    assert {sample[1] for _, epoch, samples in seen if epoch == 1 for sample in samples} == {1.0}
    with pytest.raises(ConfigError, match="PERSISTENT_WORKERS"):
        run(tmp_path / "persistent", data, grow, NUM_WORKERS=1, PERSISTENT_WORKERS=True)


def test_a_hook_that_resets_the_loader_by_the_epoch_is_resumed_in_that_epoch(tmp_path):
    def smaller(trainer):
        def build():
            cfg = trainer.cfg.clone()
            cfg.DATALOADER.BATCH_SIZE = 2 if trainer.epoch else 4  # a builder may ask for the epoch
            return trainer.build_train_loader(cfg)

        if trainer.data_loader.batch_sampler.batch_size != (2 if trainer.epoch else 4):
            trainer.reset_data_loader(build)

    seen = run(tmp_path / "whole", Changing(), smaller)
    assert [(epoch, len(samples)) for _, epoch, samples in seen] == [(0, 4)] * 3 + [(1, 2)] * 6 + [(2, 2)] * 5
    run(tmp_path / "killed", Changing(), smaller, kill=6)
    assert run(tmp_path / "killed", Changing(), smaller, resume=True) == seen[6:]


def test_a_pass_of_somebody_else_does_not_change_what_is_known_of_the_batches():
    data = loader(size=10, batch_size=3)
    batches = EpochIterator(data)
    for number in range(3):
        batch = next(batches)[0].tolist()
        assert batches.indices == batch
        if number == 1:
            list(data)  # as a hook that measures the accuracy of training


def test_a_resume_in_micro_batches_draws_no_other_random_numbers():
    batches, fresh = EpochIterator(loader(workers=1)), EpochIterator(loader())
    batches.micro_batches(2, lambda: next(batches))
    rng = torch.get_rng_state()
    fresh.load_state_dict(batches.state_dict())
    fresh.prepare()  # draws what the loader drew when its pass began
    torch.set_rng_state(rng)
    parts = fresh.micro_batches(2, lambda: next(fresh))
    assert torch.equal(torch.get_rng_state(), rng)
    assert str(parts) == str(batches.micro_batches(2, lambda: next(batches)))


def note(file, worker):
    with file.open("a") as starts:
        starts.write("+")


@pytest.mark.parametrize("steps", [1, 2])
def test_a_resume_in_the_middle_of_an_epoch_starts_workers_once(tmp_path, steps):
    started = tmp_path / "started"

    def train(length, resume):
        samples, batches = TensorDataset(torch.ones(12, 2), torch.ones(12, 1)), GlobalBatchSampler(EpochSampler(12), 3)
        data = DataLoader(samples, batch_sampler=batches, num_workers=1, worker_init_fn=partial(note, started))
        options = {"accumulation_steps": steps, "output_dir": tmp_path / "run", "config": {"LOG.WRITERS": []}}
        Trainer(nn.Linear(2, 1), data, loss=nn.MSELoss(), length=length, **options).train(resume=resume)

    train(2, False)
    train(4, True)
    assert started.read_text() == "++"
