"""Cost of a step: relative to a hand-written loop, of hooks, of metrics, and over a long run."""

import argparse
import os
import statistics
import sys
import tempfile
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..config import ConfigError
from ..engine import DefaultTrainer, SimpleTrainer, TrainerBase
from ..engine.modeling import ModelAdapter
from ..hooks import EVENTS, EventStorage, HookBase
from .measure import Run, interleaved, now, ratios, timed, usual_logging
from .work import by_hand, by_hand_with_logging, compiled, default, digits_config, lean, tiny_config

# Steps per round: the checkpoint period, so that each round saves one.
WORKS = {"tiny": (tiny_config, torch.optim.SGD, 5000), "digits": (digits_config, torch.optim.AdamW, 115)}


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Time per step relative to a hand-written loop, on a tiny model and on the digits ConvNet."""
    results: dict[str, Any] = {}
    for name, (config, optimizer, steps) in WORKS.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            open(os.devnull, "w") as console,
            usual_logging(),
        ):
            cfg = config(folder)
            runs = {
                "by hand": by_hand(cfg, optimizer),
                "lean": lean(cfg),
                "default": default(cfg),
                "by hand, logging": by_hand_with_logging(cfg, optimizer, folder, console),
            }
            skipped: dict[str, Any] = {}
            graphs = {"compiled step": None} | ({"compiled, 20 steps a call": 20} if name == "tiny" else {})
            for row, count in graphs.items():
                try:
                    runs[row] = compiled(cfg, args.backend, count)
                except ConfigError as error:
                    skipped[row] = {"status": f"skipped: {error}"}
            results[name] = ratios(interleaved(runs, args.steps or steps, args.rounds), "by hand") | skipped
    return results


def hooks(args: argparse.Namespace) -> dict[str, Any]:
    """Time per step that hooks add: to an empty step, and to a step with hooks at every event."""

    class Empty(TrainerBase):
        def run_step(self) -> None:
            pass

    idle = type("Idle", (HookBase,), {})
    one = type("One", (HookBase,), {"after_step": lambda self: None})
    around = dict.fromkeys(("before_step", "after_step", *_step_events()), _nothing)
    every = type("EveryEvent", (HookBase,), around)
    results = {}
    for label, cls, counts in (
        ("no event", idle, (1, 10, 100)),
        ("after_step", one, (1, 10, 100)),
        (f"all {len(around)} events of a step", every, (1, 10)),
    ):
        runs: dict[str, Run] = {}
        for count in (0, *counts):
            trainer: Any = _tiny() if cls is every else Empty()
            trainer.register_hooks([cls() for _ in range(count)])
            runs[str(count)] = timed(trainer)
        seconds = interleaved(runs, args.steps or 2000, args.rounds)
        results[label] = {
            f"{count} hooks": {
                "us_per_step": round(seconds[str(count)] * 1e6, 3),
                "us_per_hook": round((seconds[str(count)] - seconds["0"]) / count * 1e6, 3),
            }
            for count in counts
        }
    return results


def _nothing(self: HookBase, *args: Any) -> None:
    pass


def _step_events() -> tuple[str, ...]:
    return EVENTS[EVENTS.index("before_fetch") : EVENTS.index("after_zero_grad") + 1]


def _tiny() -> SimpleTrainer:
    model = nn.Linear(8, 8)
    batch = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64))
    batches = [batch] * 1000
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return SimpleTrainer(model, batches, optimizer, adapter=ModelAdapter(nn.CrossEntropyLoss()))


def storage(args: argparse.Namespace) -> dict[str, Any]:
    """Time per step of putting ten metrics, and of reading them every 20 steps."""
    values: dict[str, Any] = {f"loss{i}": float(i) for i in range(10)}
    tensors = {name: torch.tensor(value) for name, value in values.items()}

    def puts(metrics: dict[str, Any], period: int) -> Run:
        def run(steps: int) -> float:
            with EventStorage() as events:
                seen = 0
                start = now()
                for iteration in range(steps):
                    events.iter = iteration
                    events.put_scalars(**metrics)
                    if period and (iteration + 1) % period == 0:
                        _, seen = events.rows(period, seen)
                return now() - start

        return run

    runs = {
        "put 10 floats": puts(values, 0),
        "put 10 tensors": puts(tensors, 0),
        "put 10 floats, read every 20": puts(values, 20),
    }
    seconds = interleaved(runs, args.steps or 20_000, args.rounds)
    return {name: {"us_per_step": round(value * 1e6, 2)} for name, value in seconds.items()}


def length(args: argparse.Namespace) -> dict[str, Any]:
    """Whether steps get slower, or the process larger, over a long run."""
    steps = args.steps or 50_000
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, usual_logging():
        parts = DefaultTrainer(tiny_config(folder))
        adapter = ModelAdapter(nn.CrossEntropyLoss())
        lean_trainer = SimpleTrainer(parts.model, parts.data_loader, parts.optimizer, adapter=adapter)
        for name, trainer in {"lean": lean_trainer, "default": DefaultTrainer(tiny_config(folder))}.items():
            results[name] = _growth(trainer, steps)
    puts = args.size or 1_000_000
    results[f"{puts:,} x 10 scalars"] = _memory(puts)
    return results


def _growth(trainer: SimpleTrainer, steps: int) -> dict[str, float]:
    times: list[float] = []
    before_step = type("Times", (HookBase,), {"before_step": lambda self: times.append(now())})()
    trainer.register_hooks([before_step])
    SimpleTrainer.train(trainer, 0, steps)
    taken = [(end - start) * 1e6 for start, end in pairwise(times)]
    part = min(1000, len(taken) // 3)
    skipped = min(100, part)  # caches fill
    first, last = statistics.median(taken[skipped : skipped + part]), statistics.median(taken[-part:])
    return {
        "steps": steps,
        "first_us": round(first, 1),
        "last_us": round(last, 1),
        "last_over_first": round(last / first, 3),
    }


def _memory(puts: int) -> dict[str, float]:
    values: dict[str, Any] = {f"loss{i}": float(i) for i in range(10)}
    with EventStorage() as events:
        before = _process_bytes()
        for iteration in range(puts):
            events.iter = iteration
            events.put_scalars(**values)
        events.latest()
        return {"grown_mb": round((_process_bytes() - before) / 2**20, 1)}


def _process_bytes() -> int:
    """Memory of this process, or its peak if the system does not report the current value."""
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
