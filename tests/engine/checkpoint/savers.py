"""A process that saves, for tests that kill it. Arguments: a function of this file, and its arguments."""

import json
import logging
import os
import sys
import threading

import torch
from torch import nn

from hookline.engine.checkpoint import Checkpointer

torch.set_num_threads(1)
logging.disable()


class Slow(Checkpointer):
    """Writes only once ``gate`` is open."""

    gate = threading.Event()

    def _write(self, path, write):
        assert self.gate.wait(20)
        super()._write(path, write)


class Nothing:
    """An object with a state."""

    def state_dict(self):
        return {"value": 1}


def save_for_ever(folder, asynchronous, start):
    """Saves weights filled with the number of the iteration, in each iteration."""
    model = nn.Linear(600, 600)
    checkpointer = Checkpointer(model, folder, asynchronous=asynchronous, counter=Nothing())
    for iteration in range(start, start + 100_000):
        with torch.no_grad():
            model.weight.fill_(float(iteration))
        old = [os.path.join(folder, f"model_{iteration - 1}.pth")]
        checkpointer.save(f"model_{iteration}", iteration=iteration, outdated=old)


def save_and_end(folder):
    """Exits during an asynchronous save."""
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(1.0)
    Slow(model, folder, asynchronous=True).save("model_1", iteration=1)
    threading.Timer(0.2, Slow.gate.set).start()


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
