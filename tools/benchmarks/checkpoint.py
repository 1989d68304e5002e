"""What saving and loading cost, over writing and reading the same number of bytes."""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hookline.engine.checkpoint import Checkpointer

from .measure import Run, interleaved

PARTS = 20


def checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    """Saving and loading a model of ``--size`` parameters with AdamW's state: three times its weights."""
    model = nn.ParameterList(torch.randn(max(args.size // PARTS, 1)) for _ in range(PARTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checkpointer = Checkpointer(model, folder, optimizer=optimizer)
        checkpointer.save("state")
        path, plain, saved = (os.path.join(folder, name) for name in ("state.pth", "plain", "torch"))
        content = bytes(os.path.getsize(path))
        writes = {
            "plain write + fsync": _once(lambda: _write(plain, lambda file: file.write(content))),
            "torch.save + fsync": _once(
                lambda: _write(
                    saved,
                    lambda file: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file),
                )
            ),
            "Checkpointer.save": _once(lambda: checkpointer.save("state")),
        }
        reads = {
            "plain read": _once(lambda: _read(plain)),
            "Checkpointer.load": _once(lambda: checkpointer.load(path)),
        }
        rounds = min(args.rounds, 5)
        results: dict[str, Any] = {
            "size": {"parameters": PARTS * len(model[0]), "file_mb": round(len(content) / 1e6, 1)}
        }
        for base, runs in (("plain write + fsync", writes), ("plain read", reads)):
            seconds = interleaved(runs, 1, rounds)
            for name, value in seconds.items():
                results[name] = {"seconds": round(value, 4), "ratio": round(value / seconds[base], 2)}
    return results


def _once(act: Callable[[], Any]) -> Run:
    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            act()
        return time.perf_counter() - start

    return run


def _write(path: str, write: Callable[[Any], Any]) -> None:
    if os.path.exists(path):
        os.remove(path)
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
