"""Saving and loading a model with AdamW's state, over writing and reading as many bytes."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Groups, Run, now, repeated
from torch import nn

from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.files import verify_checkpoint

SIZES = {"": 2_000_000, ", 1.2 GB": 100_000_000}  # parameters; the state has three times as many numbers
PARTS = 20


def _checkpointer(folder: str, size: int, asynchronous: bool = False, device: str = "cpu") -> Checkpointer:
    model = nn.ParameterList(torch.randn(size // PARTS, device=device) for _ in range(PARTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return Checkpointer(model, folder, asynchronous=asynchronous, optimizer=optimizer)


def save(folder: str, size: int, device: str = "cpu") -> dict[str, Run]:
    """Return the runs that save; each step is one save."""
    at_once, beside = (_checkpointer(folder, size, asynchronous, device) for asynchronous in (False, True))
    content = _saved(at_once).read_bytes()
    state = {"model": at_once.model.state_dict(), "optimizer": at_once.checkpointables["optimizer"].state_dict()}

    def stalled(steps: int) -> float:
        seconds = 0.0
        for _ in range(steps):
            start = now()
            beside.save("asynchronous")
            seconds += now() - start
            beside.wait()
        return seconds

    return {
        "write + fsync": repeated(lambda: _write(folder, lambda file: file.write(content))),
        "torch.save + fsync": repeated(lambda: _write(folder, lambda file: torch.save(state, file))),
        "save": repeated(lambda: at_once.save("state")),
        "asynchronous, until it is complete": repeated(lambda: (beside.save("asynchronous"), beside.wait())),
        "asynchronous, time that the step waits": stalled,
    }


def load(folder: str, size: int) -> dict[str, Run]:
    """Return the runs that read; each step reads the file once."""
    saver = _checkpointer(folder, size)
    path = _saved(saver)
    return {
        "read": repeated(path.read_bytes),
        "verify": repeated(lambda: verify_checkpoint(str(path))),
        "load, verified": repeated(lambda: saver.load(str(path))),
    }


def _saved(saver: Checkpointer) -> Path:
    saver.save("state")
    return Path(saver.save_dir, "state.pth")


def _write(folder: str, write: Callable[[Any], object]) -> None:
    path = Path(folder, "by_hand")
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


GROUPS: Groups = {
    f"{act.__name__}{label}": (1, partial(act, size=size)) for label, size in SIZES.items() for act in (save, load)
}
