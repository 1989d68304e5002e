"""Each rank trains its own weights, and a hook averages them."""

import torch

from hookline.engine import comm
from hookline.engine.parallel import Strategy
from hookline.hooks import Every, HookBase


class LocalSGD(Strategy):
    same_state_on_all_ranks = True  # in checkpoints

    def before_evaluation(self, model):
        average(model.parameters())

    def before_save(self, model, optimizer):
        average(model.parameters())
        average(value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))


class AverageWeights(HookBase):
    def __init__(self, period: int = 8):
        self.every = Every(period)

    def after_step(self):
        if self.every(self.trainer):
            average(self.trainer.model.parameters())


@torch.no_grad()
def average(tensors):
    for tensor in tensors:
        torch.distributed.all_reduce(tensor)
        tensor /= comm.get_world_size()
