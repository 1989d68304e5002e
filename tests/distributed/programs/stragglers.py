"""Two ranks, of which one is slow: in loading data, in the forward pass, or in a hook."""

import logging
import time

import torch
from results import write_result
from torch import nn

from hookline.engine import SimpleTrainer, comm
from hookline.hooks import ForwardTimer, HookBase

PAUSE, LATE = 0.04, 20


class Listening(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Model(nn.Module):
    def __init__(self, slow):
        super().__init__()
        self.layer, self.slow, self.calls = nn.Linear(4, 1), slow, 0

    def forward(self, x):
        self.calls += 1
        if self.slow and comm.get_rank() == 1 and self.calls <= LATE:
            time.sleep(PAUSE)
        return {"loss": self.layer(x).square().mean()}


class Batches(list):
    """Batches that rank 1 reads slowly."""

    def __iter__(self):
        for batch in super().__iter__():
            if comm.get_rank() == 1:
                time.sleep(PAUSE)
            yield batch


class SlowHook(HookBase):
    def after_step(self):
        if self.trainer.comm.get_rank() == 1:
            time.sleep(PAUSE)


class Write(HookBase):
    """Shares metrics every 5 steps."""

    def after_step(self):
        if self.trainer.iter % 5 == 4:
            self.trainer.request_write(everywhere=True)


def lines_of(slow):
    listening = Listening()
    logger = logging.getLogger("hookline.engine.ranks.stragglers")
    logger.setLevel(logging.INFO)
    logger.addHandler(listening)
    model = nn.parallel.DistributedDataParallel(Model(slow == "forward"))
    batches = (Batches if slow == "data" else list)([torch.ones(2, 4)] * 5)
    trainer = SimpleTrainer(model, batches, torch.optim.SGD(model.parameters(), lr=0.1))
    hooks = [Write(), ForwardTimer()]
    trainer.register_hooks([*hooks, SlowHook()] if slow == "hook" else hooks)
    trainer.train(0, 40 if slow == "forward" else 25)
    logger.removeHandler(listening)
    return listening.lines


def main(folder):
    write_result(folder, {slow: lines_of(slow) for slow in ("data", "forward", "hook")})
