"""Saving and loading a model with AdamW's state, over writing and reading as many bytes."""

import os
from functools import partial
from pathlib import Path

import torch
from measure import Groups, Run, now, repeated
from torch import nn

from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.files import verify_checkpoint

SIZES = {"2M parameters": 2_000_000, "100M parameters": 100_000_000}  # the state has three times as many numbers
PARTS = 20


def _checkpointer(folder: str, size: int, asynchronous: bool = False) -> Checkpointer:
    model = nn.ParameterList(torch.randn(size // PARTS) for _ in range(PARTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return Checkpointer(model, folder, asynchronous=asynchronous, optimizer=optimizer)


def _runs(folder: str, size: int) -> dict[str, Run]:
    """Return the runs, whose step is one save or one load."""
    at_once, beside = (_checkpointer(folder, size, asynchronous) for asynchronous in (False, True))
    at_once.save("state")
    path = Path(folder, "state.pth")
    content = path.read_bytes()

    def write() -> None:
        with Path(folder, "by_hand").open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def stalled(steps: int) -> float:
        seconds = 0.0
        for _ in range(steps):
            start = now()
            beside.save("asynchronous")
            seconds += now() - start
            beside.wait()
        return seconds

    return {
        "write + fsync": repeated(write),
        "save": repeated(lambda: at_once.save("saved")),
        "asynchronous, until it is complete": repeated(lambda: (beside.save("asynchronous"), beside.wait())),
        "asynchronous, time that the step waits": stalled,
        "read": repeated(path.read_bytes),
        "verify": repeated(lambda: verify_checkpoint(str(path))),
        "load, verified": repeated(lambda: at_once.load(str(path))),
    }


GROUPS: Groups = {name: (1, partial(_runs, size=size)) for name, size in SIZES.items()}
