"""Strategies for ``PARALLEL.NAME``."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hookline.engine import comm
from hookline.engine.parallel import Strategy
from hookline.hooks import HookBase

# The last layer stays whole.
PLAN = {"1": ColwiseParallel(), "3": RowwiseParallel()}


class TensorParallel(Strategy):
    data_rank, data_size = 0, 1

    def wrap(self, model, device):
        mesh = init_device_mesh(device.type, (comm.get_world_size(),))
        return parallelize_module(model, mesh, PLAN)


class Undeclared(Strategy):
    wrap = TensorParallel.wrap


class LocalSGD(Strategy):
    def before_evaluation(self, model):
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.data)
            parameter.data /= comm.get_world_size()


class DrawnSame(HookBase):
    """Checks that ranks that share a batch draw the same random numbers, for dropout."""

    def after_step(self):
        drawn = comm.all_gather(torch.rand(()).item())
        assert len(set(drawn)) == comm.get_data_size(), drawn
