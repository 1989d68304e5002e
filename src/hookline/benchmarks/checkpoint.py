"""Cost of saving and loading, relative to writing and reading the same number of bytes."""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..engine.checkpoint import Checkpointer
from ..engine.checkpoint.checkpoint_file import verify_checkpoint
from .measure import all_times, now, repeated

PARTS = 20


def checkpoint(args: argparse.Namespace, device: str = "cpu") -> dict[str, Any]:
    """Save and load a model of ``--size`` parameters with AdamW's state: three times the size of its weights.

    An asynchronous save is measured twice: the time that the caller is blocked, and the time until the file is
    complete. The memory is the peak beyond the state itself.
    """
    model = nn.ParameterList(
        torch.randn(max((args.size or 2_000_000) // PARTS, 1), device=device) for _ in range(PARTS)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        at_once = Checkpointer(model, folder, optimizer=optimizer)
        beside = Checkpointer(model, folder, asynchronous=True, optimizer=optimizer)
        memory = {
            "save": _peak(lambda: at_once.save("state")),
            "save, asynchronous": _peak(lambda: _save_and_wait(beside)),
        }
        path, plain, saved = (os.path.join(folder, name) for name in ("state.pth", "plain", "torch"))
        with open(path, "rb") as file:
            content = bytearray(file.read())  # the same bytes, and an allocated buffer to read into
        stalled: list[float] = []
        writes = {
            "plain write + fsync": repeated(lambda: _write(plain, lambda file: file.write(content))),
            "torch.save + fsync": repeated(
                lambda: _write(
                    saved,
                    lambda file: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file),
                )
            ),
            "save": repeated(lambda: at_once.save("state")),
            "save, asynchronous": repeated(lambda: stalled.append(_save_and_wait(beside))),
        }
        reads = {
            "plain read": repeated(lambda: _read(plain, content)),
            "load": repeated(lambda: at_once.load(path)),
            "verify": repeated(lambda: verify_checkpoint(path)),
        }
        results: dict[str, Any] = {
            "size": {"parameters": PARTS * len(model[0]), "file_mb": round(len(content) / 1e6, 1)}
        }
        for base, runs in (("plain write + fsync", writes), ("plain read", reads)):
            times = all_times(runs, 1, args.rounds)
            middle = statistics.median(times[base])
            for name, seconds in times.items():
                results[name] = _summary(seconds, middle)
                if name in memory:
                    results[name]["memory_mb"] = round(memory[name] / 1e6, 1)
            if "save, asynchronous" in times:  # the warm-up is not counted
                results["save, asynchronous: stalled"] = _summary(stalled[1:], middle)
        beside.close()
    return results


def _summary(seconds: list[float], base: float) -> dict[str, float]:
    middle = statistics.median(seconds)
    return {
        "seconds": round(middle, 4),
        "ratio": round(middle / base, 2),
        "least": round(min(seconds), 4),
        "most": round(max(seconds), 4),
    }


def _save_and_wait(checkpointer: Checkpointer) -> float:
    """Save, and return the seconds that training would be blocked."""
    start = now()
    checkpointer.save("asynchronous")
    stalled = now() - start
    checkpointer.wait()
    return stalled


def _peak(act: Callable[[], Any]) -> int:
    """Peak growth of this process during ``act``, in bytes; 0 if the system does not report it."""
    before, done, most = _resident(), threading.Event(), 0

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, _resident())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        act()
    finally:
        done.set()
        watcher.join()
    return max(most - before, 0)


def _resident() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


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
