"""Weights that begin as those of rank 0, and ranks that share a batch."""

import torch
from results import write_result
from torch import nn
from torch.utils.data import DataLoader

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer, comm
from hookline.engine.data import GlobalBatchSampler, TrainingSampler
from hookline.engine.data.samplers import InferenceSampler
from hookline.engine.evaluation import write_predictions
from hookline.engine.evaluation.evaluator import outputs_of
from hookline.engine.parallel import Strategy
from hookline.engine.parallel.base import share_weights


def weights(folder):
    rank = comm.get_rank()
    model = nn.Sequential(nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), nn.LazyLinear(2))
    kinds = [torch.bool, torch.int16, torch.float64, torch.bfloat16, torch.complex64]
    for number, kind in enumerate(kinds):
        model.register_buffer(f"b{number}", torch.full((3,), 1 - rank, dtype=kind))
    model.register_buffer("expanded", torch.ones(1).expand(4))
    torch.nn.init.constant_(model[0].weight, 1 - rank)
    share_weights(model)
    sums = [model[0].weight.sum().item(), *(abs(model.get_buffer(f"b{n}").sum().item()) for n in range(5))]
    write_result(folder, sums)


class Shared(Strategy):
    data_rank, data_size = 0, 1


def refused():
    """The error for a loader that was built before the data ranks were set."""
    model = nn.Linear(1, 1)
    loader = DataLoader([torch.zeros(1)] * 6, batch_sampler=GlobalBatchSampler(range(6), 4))
    try:
        SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), 0.1), strategy=Shared())
    except ConfigError as error:
        return str(error)


def error_of(rank, size):
    try:
        comm.set_data_ranks(rank, size)
    except ConfigError as error:
        return str(error)


def samplers(folder):
    rank = comm.get_rank()
    before = len(InferenceSampler(5))
    errors = [refused(), error_of(0, 2), error_of(rank, 1 + rank), error_of(1 - rank, 2), error_of(0, 0)]
    comm.set_data_ranks(0, 1)
    one = GlobalBatchSampler(range(6), 4)
    predicted = write_predictions(outputs_of(nn.Identity(), [torch.arange(3.0)]), str(folder))
    shared = [list(one), list(InferenceSampler(5)), next(iter(TrainingSampler(5, shuffle=False))), predicted[1]]
    write_result(folder, [before, errors, shared])
