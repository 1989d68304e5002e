"""Other trainers and hookline on the tiny model, each in its own process, in turns."""

import argparse
import gc
import multiprocessing
import os
import statistics
import tempfile
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..config import ConfigError
from .measure import use_clock, usual_logging
from .peers import PEERS, installed, runs_of

SETUPS = ("by hand", "lean", "default")


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Each peer's time per step over that of the hand-written loop in the same process.

    Each peer has its own process, since imports and patches of one would slow another. They run one at a time, and each
    round includes all.
    """
    names = ["hookline", *dict.fromkeys(name for name in args.compare.split(",") if name and name != "hookline")]
    if "all" in names:
        names = list(PEERS)
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ConfigError(f"--compare: {', '.join(unknown)}: expected {', '.join(PEERS)} or all")
    workers = {name: Worker(name, args.clock) for name in names if installed(name)}
    steps = args.steps or 2000
    try:
        for number in range(args.rounds + 1):
            for worker in workers.values():
                for setup in SETUPS:
                    worker.run(setup, steps, counted=number > 0)
    finally:
        for worker in workers.values():
            worker.end()
    return {name: workers[name].result() if name in workers else {"status": "not installed"} for name in names}


class Worker:
    """A process that has one peer's set-ups."""

    def __init__(self, name: str, clock: str) -> None:
        self._name = name
        self._times: dict[str, list[float]] = {setup: [] for setup in SETUPS}
        self._error = ""
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, name, clock), daemon=True)
        self._process.start()
        other.close()

    def run(self, setup: str, steps: int, counted: bool) -> None:
        """Run ``steps`` steps in the worker and wait for the result."""
        if self._error:
            return
        try:
            self._pipe.send((setup, steps))
            answer = self._pipe.recv()
        except (EOFError, OSError):
            answer = "its process ended"
        if isinstance(answer, str):
            self._error = answer
        elif counted:
            self._times[setup].append(answer / steps)

    def end(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def result(self) -> dict[str, Any]:
        """Ratios to the hand-written loop, or the error."""
        if self._error:
            return {"status": f"failed: {self._error}"}
        seconds = {setup: statistics.median(times) for setup, times in self._times.items()}
        return {
            "version": installed(self._name),
            "by_hand_us": round(seconds["by hand"] * 1e6, 1),
            "lean": round(seconds["lean"] / seconds["by hand"], 2),
            "default": round(seconds["default"] / seconds["by hand"], 2),
        }


def serve(pipe: Connection, name: str, clock: str) -> None:
    """In the worker: serve requests until the pipe is closed. Output of peers is discarded."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    torch.set_num_threads(1)
    use_clock(clock)
    with tempfile.TemporaryDirectory() as folder, usual_logging():
        os.chdir(folder)
        runs = None
        while True:
            try:
                setup, steps = pipe.recv()
            except EOFError:
                break
            try:
                runs = runs or runs_of(name, folder)
                gc.collect()
                pipe.send(runs[setup](steps))
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                message = str(error).strip().splitlines()[:1]
                pipe.send(
                    f"{type(error).__name__}: {''.join(message)} ({os.path.basename(last.filename)}:{last.lineno})"
                )
        os.chdir(os.sep)
