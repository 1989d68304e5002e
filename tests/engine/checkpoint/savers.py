"""Processes that save, for tests that kill them: each line ``[function, arguments]`` on standard input forks one.

A process of their own forks them, since one in which tests have run has threads that a fork would lose.
"""

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
    """Something with a state."""

    def state_dict(self):
        return {"value": 1}


def save_for_ever(folder, asynchronous, start):
    """Saves weights that are all of the iteration's number, one iteration after the other."""
    model = nn.Linear(600, 600)
    checkpointer = Checkpointer(model, folder, asynchronous=asynchronous, counter=Nothing())
    for iteration in range(start, start + 100_000):
        with torch.no_grad():
            model.weight.fill_(float(iteration))
        old = [os.path.join(folder, f"model_{iteration - 1}.pth")]
        checkpointer.save(f"model_{iteration}", iteration=iteration, outdated=old)


def save_and_end(folder):
    """Ends while its save is on its way."""
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(1.0)
    Slow(model, folder, asynchronous=True).save("model_1", iteration=1)
    threading.Timer(0.2, Slow.gate.set).start()


def main():
    for line in sys.stdin:
        name, arguments = json.loads(line)
        child = os.fork()
        if not child:
            return globals()[name](*arguments)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


if __name__ == "__main__":
    main()
