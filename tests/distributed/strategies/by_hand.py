"""A strategy that exchanges gradients itself."""

import torch

from hookline.engine import comm
from hookline.engine.parallel import Strategy


class ByHand(Strategy):
    averages = True

    def wrap(self, model, device):
        self.parameters = list(model.parameters())
        return model

    def backward(self, losses):
        losses.backward()
        for parameter in self.parameters:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= comm.get_world_size()
