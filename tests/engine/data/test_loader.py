"""Loaders: errors that name the sample, and workers that leave signals to the training process."""

import gc
import os
import signal
from itertools import islice

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from hookline.config import get_cfg
from hookline.engine.data import (
    DATASET_REGISTRY,
    EpochIterator,
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


@pytest.mark.parametrize(
    ("entry", "note", "workers", "test"),
    [
        ("OneIsBroken", "sample 5 of OneIsBroken", 1, True),
        ({"NAME": "OneIsBroken", "ARGS": {"deterministic": True}}, "sample 5 of OneIsBroken", 0, False),
        ("ShapesDiffer", "batch of the samples ", 0, True),
        ("BrokenStream", "sample 6 of BrokenStream", 1, False),
        ("broken_transform", "sample 3 of the stream, in the transform", 0, True),
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


class Numbers(torch.utils.data.Dataset):
    """Not known to be deterministic, so read by a SeededLoader."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index])


class Noting(Numbers):
    begun = False

    def __getitem__(self, index):
        return [self.begun, *map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))]


def test_a_workers_signals_are_unblocked_and_its_own_init_function_is_called():
    def begin(worker_id):
        Noting.begun = True

    assert list(WorkerLoader(Noting(), batch_size=None, num_workers=1, worker_init_fn=begin)) == [[True]] * 8


def collate(samples):
    return torch.cat([sample[0] if isinstance(sample, tuple) else sample for sample in samples])


@pytest.mark.parametrize(
    ("dataset", "number"),
    [(TensorDataset(torch.arange(8)[:, None]), signal.SIGINT), (Numbers(), signal.SIGTERM)],
    ids=["batches", "samples"],
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
    loader = build_batch_data_loader(dataset, range(8), 2, num_workers=2, collate_fn=collate, seed=0)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(8))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_after_an_error_the_workers_end_at_once_when_the_loader_is_freed(monkeypatch):
    # How long torch waits for them: longer than a test may take.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 1000.0)
    data = OneIsBroken(at=0)
    loader = build_batch_data_loader(data, range(8), 2, num_workers=2, persistent_workers=False)

    def run():
        batches = iter(loader)
        workers = list(batches._workers)
        try:
            next(batches)
        except KeyError as error:
            cycle = [error]  # keeps this frame, and with it the iterator
            cycle.append(cycle)
        return workers

    workers = run()
    gc.collect()
    assert not any(worker.is_alive() for worker in workers)
