"""Loaders: errors that name the sample, and workers that leave signals to the training process."""

import gc
import os
import signal
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from hookline.config import get_cfg
from hookline.engine.data import (
    DATASET_REGISTRY,
    EpochIterator,
    EpochSampler,
    ShardedIterable,
    build_batch_data_loader,
    build_test_loader,
    build_train_loader,
)
from hookline.engine.data.loader import WorkerLoader, whole_pass


@DATASET_REGISTRY.register()
class OneIsBroken(Dataset):
    def __init__(self, deterministic: bool = False, at: int = 5) -> None:
        self.deterministic, self.at = deterministic, at

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.at:
            raise KeyError("photo.png")
        return torch.zeros(3)


@DATASET_REGISTRY.register()
class ShapesDiffer(OneIsBroken):
    def __getitem__(self, index):
        return torch.zeros(index)


@DATASET_REGISTRY.register()
class BrokenStream(IterableDataset):
    deterministic = True

    def __iter__(self):
        yield from range(6)
        raise OSError("bad line")


def fails_at_three(sample):
    if sample == 3:
        raise ValueError("three")
    return sample


@DATASET_REGISTRY.register()
def broken_transform():
    return ShardedIterable(range(8), fails_at_three)


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("entry", "note"),
    [
        ("OneIsBroken", "while reading sample 5 of OneIsBroken"),
        ({"NAME": "OneIsBroken", "ARGS": {"deterministic": True}}, "while reading sample 5 of OneIsBroken"),
        ("ShapesDiffer", "while making a batch of sample "),
        ("BrokenStream", "while reading sample 6 of BrokenStream"),
        ("broken_transform", "while reading sample 3 of the stream, in the transform"),
    ],
)
def test_the_error_names_the_sample(entry, note, workers, test):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "DATALOADER.BATCH_SIZE", 4, "DATALOADER.NUM_WORKERS", workers])
    cfg.merge_from_list(["DATASETS.TRAIN", [entry], "DATASETS.TEST", [entry]])
    name = entry if isinstance(entry, str) else entry["NAME"]
    batches = whole_pass(build_test_loader(cfg, name)) if test else EpochIterator(build_train_loader(cfg))
    with pytest.raises((KeyError, RuntimeError, OSError, ValueError)) as caught:
        list(islice(batches, 2))
    assert note in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_a_concatenated_set_is_named_with_the_samples_own_index():
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.DATASETS.TRAIN = [{"NAME": "OneIsBroken", "ARGS": {"at": -1}}, "OneIsBroken"]
    with pytest.raises(KeyError) as caught:
        next(EpochIterator(build_train_loader(cfg)))
    assert caught.value.__notes__ == ["while reading sample 5 of OneIsBroken (set 1 of the concatenated ones)"]


def test_part_of_a_data_set_names_the_one_sample_too():
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "DATASETS.TEST", ["OneIsBroken"], "DATALOADER.LIMIT_TEST_BATCHES", 1])
    with pytest.raises(KeyError) as caught:
        list(whole_pass(build_test_loader(cfg, "OneIsBroken")))
    assert caught.value.__notes__ == ["while reading sample 5 of OneIsBroken"]


def test_a_subset_of_ones_own_is_read_as_torch_reads_it():
    class Doubled(Subset):
        def __getitems__(self, indices):
            return [2 * self.dataset[self.indices[index]] for index in indices]

    loader = DataLoader(Doubled([1, 2, 3, 4], [3, 2]), batch_size=2)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in whole_pass(loader)] == [[8, 6]]


SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


class Numbers(torch.utils.data.Dataset):
    """Not known to be deterministic, so read by a SeededLoader."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index])


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter([torch.tensor([index]) for index in range(info.id, 8, info.num_workers)])


def collate(samples):
    return torch.cat([sample[0] if isinstance(sample, tuple) else sample for sample in samples])


@pytest.mark.parametrize("number", sorted(SIGNALS))
@pytest.mark.parametrize(
    "dataset", [TensorDataset(torch.arange(8)[:, None]), Numbers(), Stream()], ids=["batches", "samples", "stream"]
)
def test_a_signal_before_a_worker_has_started_does_not_end_it(dataset, number, monkeypatch):
    """Sends a signal between torch's SIGTERM handler and worker_init_fn."""
    seed = torch.manual_seed

    def seed_in_time(value):
        if get_worker_info() is None and os.getpid() != parent:
            os.kill(os.getpid(), number)
        return seed(value)

    parent = os.getpid()
    monkeypatch.setattr(torch, "manual_seed", seed_in_time)
    sampler = None if isinstance(dataset, IterableDataset) else range(8)
    loader = build_batch_data_loader(dataset, sampler, 2, num_workers=2, collate_fn=collate, seed=0)
    for _ in range(2):
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(8))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []).isdisjoint(SIGNALS)


class Mask(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])], self.started

    started = False


def test_a_workers_signals_are_unblocked_and_its_own_init_function_is_called():
    def begin(worker_id):
        Mask.started = True

    loader = WorkerLoader(Mask(), batch_size=None, num_workers=1, worker_init_fn=begin)
    assert list(loader) == [[[], True]]
    assert loader.worker_init_fn is begin


class Fails:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise ValueError("bad sample")


def test_after_an_error_the_workers_end_at_once_when_the_loader_is_freed(monkeypatch):
    # How long torch waits for them: longer than a test may take.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 1000.0)
    sampler = EpochSampler(8, seed=0)
    loader = build_batch_data_loader(Fails(), sampler, 2, num_workers=2, persistent_workers=False)

    def run():
        batches = iter(loader)
        workers = list(batches._workers)
        try:
            next(batches)
        except ValueError as error:
            cycle = [error]  # keeps this frame, and with it the iterator
            cycle.append(cycle)
        return workers

    workers = run()
    gc.collect()
    assert not any(worker.is_alive() for worker in workers)
