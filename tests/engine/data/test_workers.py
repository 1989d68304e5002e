"""Loader workers ignore signals that all processes of a job get."""

import gc
import os
import signal

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from hookline.engine.data import EpochSampler, build_batch_data_loader
from hookline.engine.data.workers import WorkerLoader

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
