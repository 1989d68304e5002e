"""The engine's own work among ranks: what it costs, and how it grows with their number."""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ..config import get_cfg
from ..engine import comm
from ..engine.checkpoint.sharded_checkpointer import ShardedCheckpointer
from ..engine.ranks.agreement import Agreement, HookList
from ..engine.ranks.same_config import check_same_config
from ..engine.ranks.shared_metrics import share_metrics
from ..engine.ranks.stragglers import Stragglers
from ..engine.step.random_state import RandomState
from ..hooks import EventStorage

LOSSES, PERIOD = 3, 20  # of a run, between two writes

# A function of "python -c" runs in forked ranks, which share the memory of what is imported.
_PROGRAM = """
import json, sys, time
from hookline.benchmarks.scaling import {function} as act
from hookline.engine import launch

def main(began, folder, rounds):
    return act(began, folder, rounds)

if __name__ == "__main__":
    try:
        args = time.time(), sys.argv[2], int(sys.argv[3])
        print(json.dumps(launch(main, int(sys.argv[1]), args=args, device="cpu")))
    finally:
        print(time.time())
"""


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each exchange for 2, 4, 8 ... ranks (``--size``, at most) on this machine.

    "cpu" is the time that one rank computes, which a rank of its own machine needs too. "wall" is the time until it is
    done, on a machine with fewer cores than ranks. Both are the least of all rounds.
    """
    results: dict[str, Any] = {}
    for ranks in (2**power for power in range(1, (args.size or 64).bit_length())):
        for name, numbers in {**_run("measure", ranks, args.rounds), "failure": _failure(ranks)}.items():
            results.setdefault(name, {})[f"{ranks} ranks"] = numbers
    return results


def _run(function: str, ranks: int, rounds: int) -> dict[str, Any]:
    lines = _start(function, ranks, rounds).splitlines()
    return json.loads(lines[0])


def _failure(ranks: int) -> dict[str, float]:
    """The time from the death of a rank to the end of all."""
    died, *_, ended = _start("fail", ranks, 1).splitlines()
    return {"wall_ms": round((float(ended) - float(died)) * 1e3)}


def _start(function: str, ranks: int, rounds: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        program = _PROGRAM.format(function=function)
        command = [sys.executable, "-c", program, str(ranks), folder, str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and function != "fail":
        raise RuntimeError(f"{ranks} ranks failed:\n{done.stderr}")
    return done.stdout


def fail(began: float, folder: str, rounds: int) -> None:
    """A rank is killed while the others wait for it in a collective."""
    comm.synchronize()
    if comm.get_rank() == comm.get_world_size() - 1:
        print(time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.synchronize()


def measure(began: float, folder: str, rounds: int) -> dict[str, Any]:
    """Measure all exchanges in one rank, beside the others. Returns the numbers of rank 0, by name."""
    torch.set_num_threads(1)
    results = {"start": {"wall_ms": round((time.time() - began) * 1e3), "cpu_ms": round(_cpu() * 1e3, 2)}}
    storage, agreement = EventStorage(0), Agreement(0, HookList(("IterationTimer", "PeriodicWriter")))
    cfg, random, stragglers = get_cfg(), RandomState(), Stragglers()
    model: Any = fully_shard(nn.Linear(64, 64 * comm.get_world_size()))
    checkpointer = ShardedCheckpointer(model, folder)
    losses = {f"loss_{number}" for number in range(LOSSES)}
    numbers = {"iteration": 0, "save": 0}

    def exchange() -> None:
        agreement.exchange(numbers["iteration"], agreement._hooks)

    def metrics() -> None:
        share_metrics(storage, numbers["iteration"], stragglers, {})

    def steps() -> None:
        for _ in range(PERIOD):
            numbers["iteration"] += 1
            storage.iter = numbers["iteration"]
            for name in losses:
                storage.put_scalar(name, 1.0)
        storage.average_over_ranks(losses)

    def save() -> None:
        numbers["save"] += 1
        checkpointer.save(f"model_{numbers['save']}")

    acts: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
        "exchange of requests": (exchange, lambda: None, 10),
        "metrics": (metrics, steps, 1),
        "random states": (lambda: random.gather(numbers["iteration"]), lambda: None, 1),
        "sharded save": (save, lambda: None, 1),
        "barrier": (lambda: comm.barrier("scaling"), lambda: None, 1),
        "config check": (lambda: check_same_config(cfg, {}), lambda: None, 1),
    }
    for name, (act, before, times) in acts.items():
        walls, cpus = [], []
        for _ in range(rounds + 1):
            before()
            comm.synchronize()
            start = time.perf_counter(), _cpu()
            for _ in range(times):
                act()
            walls.append((time.perf_counter() - start[0]) / times)
            cpus.append((_cpu() - start[1]) / times)
        everyone = comm.all_gather(min(cpus[1:]))
        others = sorted(everyone[1:])[len(everyone[1:]) // 2]
        results[name] = {
            "wall_ms": round(min(walls[1:]) * 1e3, 2),
            "cpu_ms": round(others * 1e3, 2),
            "cpu_rank0_ms": round(everyone[0] * 1e3, 2),
        }
    checkpointer.close()
    return results


def _cpu() -> float:
    """Seconds that all threads of this process have computed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
