"""What saving and loading cost, over writing and reading the same number of bytes."""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hookline.engine.checkpoint import Checkpointer

from .measure import Run, all_times, now

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
        with open(path, "rb") as file:
            content = bytearray(file.read())  # the same bytes; and a buffer to read into, whose memory is there already
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
            "plain read": _once(lambda: _read(plain, content)),
            "Checkpointer.load": _once(lambda: checkpointer.load(path)),
        }
        rounds = args.rounds
        results: dict[str, Any] = {
            "size": {"parameters": PARTS * len(model[0]), "file_mb": round(len(content) / 1e6, 1)}
        }
        for base, runs in (("plain write + fsync", writes), ("plain read", reads)):
            times = all_times(runs, 1, rounds)
            for name, seconds in times.items():
                middle = statistics.median(seconds)
                results[name] = {
                    "seconds": round(middle, 4),
                    "ratio": round(middle / statistics.median(times[base]), 2),
                    "least": round(min(seconds), 4),
                    "most": round(max(seconds), 4),
                }
    return results


def _once(act: Callable[[], Any]) -> Run:
    def run(steps: int) -> float:
        start = now()
        for _ in range(steps):
            act()
        return now() - start

    return run


def _write(path: str, write: Callable[[Any], Any]) -> None:
    if os.path.exists(path):
        os.remove(path)
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: str, buffer: bytearray) -> None:
    with open(path, "rb", buffering=0) as file:
        rest = memoryview(buffer)
        while read := file.readinto(rest):
            rest = rest[read:]
