#!/usr/bin/env python
"""What the engine costs, measured against the same work written by hand.

    python tools/benchmark.py overhead      # time per step over the hand-written loop's
    python tools/benchmark.py hooks         # time per step of 0 to 100 hooks
    python tools/benchmark.py storage       # time per put of the metrics' storage

Everything is measured in one process and one thread, in interleaved rounds (so that a slow moment of the machine
meets all alike), and reported as medians. ``--json`` prints one JSON object instead of a table.
"""

import argparse
import gc
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookline.config import CfgNode, get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer
from hookline.engine.data import build_train_loader
from hookline.engine.modeling import MODEL_REGISTRY, ModelAdapter, build_model
from hookline.hooks import EVENTS, EventStorage, HookBase

DIGITS = str(Path(__file__).resolve().parent.parent / "configs" / "digits" / "convnet.yaml")


# ---------------------------------------------------------------------------- measuring


def interleaved(runs: dict[str, Callable[[int], float]], steps: int, rounds: int) -> dict[str, float]:
    """Median seconds per step of each run.

    Args:
        runs: functions that take a number of steps and return the seconds they took.
        steps: in each round.
        rounds: how often each is run, in turns; a first one, to warm up, is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(rounds + 1):
        for name, run in runs.items():
            gc.collect()
            seconds = run(steps) / steps
            if round_number:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def train_timed(trainer: SimpleTrainer) -> Callable[[int], float]:
    """Runs a trainer for so many steps; the start and the end of training are not counted, writing in between is."""

    def run(steps: int) -> float:
        clock = StepClock(steps)
        trainer.register_hooks([clock])
        SimpleTrainer.train(trainer, 0, steps + StepClock.WARM_UP)
        trainer.remove_hook(clock)
        return clock.seconds

    return run


class StepClock(HookBase):
    """Notes the time at which step ``WARM_UP`` begins and the last one ends; costs half a microsecond a step."""

    WARM_UP = 20

    def __init__(self, steps: int) -> None:
        self._last = steps + self.WARM_UP - 1
        self.seconds = 0.0

    def before_step(self) -> None:
        if self.trainer.iter == self.WARM_UP:
            self._start = time.perf_counter()

    def after_train(self) -> None:
        self.seconds = self._end - self._start

    def after_step(self) -> None:
        if self.trainer.iter == self._last:
            self._end = time.perf_counter()


# ---------------------------------------------------------------------------- the work


@MODEL_REGISTRY.register()
class BenchmarkLinear(nn.Linear):
    """Linear(8, 8): so little work that what is measured is everything around it."""

    def __init__(self) -> None:
        super().__init__(8, 8)


def tiny_config(folder: str) -> CfgNode:
    """Linear(8, 8), batches of 4 random samples, SGD."""
    cfg = get_cfg()
    cfg.MODEL.NAME = "BenchmarkLinear"
    cfg.MODEL.LOSS.NAME = "CrossEntropyLoss"
    cfg.DATASETS.TRAIN = ({"NAME": "synthetic", "ARGS": {"size": 4096, "shape": [8], "num_classes": 8}},)
    cfg.DATALOADER.BATCH_SIZE = 4
    cfg.SOLVER.MOMENTUM = 0.0
    cfg.SOLVER.WEIGHT_DECAY = 0.0
    cfg.SOLVER.BASE_LR = 0.01
    return _common(cfg, folder)


def digits_config(folder: str) -> CfgNode:
    """The digits ConvNet, batches of 64, AdamW."""
    cfg = get_cfg()
    cfg.merge_from_file(DIGITS)
    cfg.DATASETS.TEST = ()
    cfg.CHECKPOINT.BEST.METRIC = ""
    return _common(cfg, folder)


def _common(cfg: CfgNode, folder: str) -> CfgNode:
    cfg.MODEL.DEVICE = "cpu"
    cfg.SEED = 0
    cfg.SOLVER.MAX_ITER = 100_000
    cfg.SOLVER.CHECKPOINT_PERIOD = 5000
    cfg.OUTPUT_DIR = folder
    return cfg


def by_hand(cfg: CfgNode, optimizer: type[torch.optim.Optimizer]) -> Callable[[int], float]:
    """The loop people write: a DataLoader that shuffles and collates, zero_grad, backward, step."""
    torch.manual_seed(0)
    model = build_model(cfg)
    dataset: Any = build_train_loader(cfg).dataset
    data = torch.utils.data.TensorDataset(*dataset.tensors)
    loader = torch.utils.data.DataLoader(data, batch_size=cfg.DATALOADER.BATCH_SIZE, shuffle=True)
    opt = optimizer(model.parameters(), lr=cfg.SOLVER.BASE_LR)
    loss_function = nn.CrossEntropyLoss()

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    batches = forever()

    def run(steps: int) -> float:
        model.train()
        start = time.perf_counter()
        for _ in range(steps):
            x, y = next(batches)
            loss = loss_function(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        return time.perf_counter() - start

    return run


def lean(cfg: CfgNode) -> Callable[[int], float]:
    """SimpleTrainer with the same model, data and optimizer, and no hooks (but the clock)."""
    parts = DefaultTrainer(cfg)
    adapter = ModelAdapter(nn.CrossEntropyLoss())
    return train_timed(SimpleTrainer(parts.model, parts.data_loader, parts.optimizer, adapter=adapter))


def full(cfg: CfgNode) -> Callable[[int], float]:
    """DefaultTrainer with all it has by default."""
    return train_timed(DefaultTrainer(cfg))


# ---------------------------------------------------------------------------- commands


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Engine over hand-written loop, on a tiny model and on the digits ConvNet."""
    results: dict[str, Any] = {}
    works = {"tiny": (tiny_config, torch.optim.SGD, 2000), "digits": (digits_config, torch.optim.AdamW, 100)}
    for name, (config, optimizer, steps) in works.items():
        with tempfile.TemporaryDirectory() as folder:
            cfg = config(folder)
            runs = {"by hand": by_hand(cfg, optimizer), "lean": lean(cfg), "default": full(cfg)}
            seconds = interleaved(runs, args.steps or steps, args.rounds)
        results[name] = {
            run: {"us_per_step": round(value * 1e6, 1), "ratio": round(value / seconds["by hand"], 3)}
            for run, value in seconds.items()
        }
    return results


def hooks(args: argparse.Namespace) -> dict[str, Any]:
    """Time per step that hooks add, by their number and by how many events they override."""

    class Trainer(SimpleTrainer):
        def run_step(self) -> None:  # every event of a step, and nothing else
            for event in STEP:
                if self._listeners[event]:
                    self._dispatch(event, *ARGUMENTS.get(event, ()))

    one = type("One", (HookBase,), {"after_step": lambda self: None})
    every = type("Every", (HookBase,), {event: lambda self, *args: None for event in (*STEP, *AROUND)})
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs = {}
    for label, cls in {"none": HookBase, "one": one, "all": every}.items():
        for count in (0, 1, 10, 100):
            trainer = Trainer(model, [0], optimizer)
            trainer.register_hooks([cls() for _ in range(count)])
            runs[f"{count} hooks, {label} event(s)"] = train_timed(trainer)
    seconds = interleaved(runs, args.steps or 2000, args.rounds)
    base = seconds["0 hooks, none event(s)"]
    return {
        name: {"us_per_step": round(value * 1e6, 3), "us_added": round((value - base) * 1e6, 3)}
        for name, value in seconds.items()
    }


STEP = EVENTS[EVENTS.index("before_fetch") : EVENTS.index("after_zero_grad") + 1]
AROUND = ("before_step", "after_step")
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "after_fetch": (0,),
    "before_forward": (0,),
    "after_forward": (0, 0),
    "before_backward": (0,),
}


def storage(args: argparse.Namespace) -> dict[str, Any]:
    """Time per step of putting ten losses, and of reading them every 20 steps."""
    values = {f"loss{i}": float(i) for i in range(10)}
    tensors = {name: torch.tensor(value) for name, value in values.items()}

    def puts(metrics: dict[str, Any], period: int) -> Callable[[int], float]:
        def run(steps: int) -> float:
            with EventStorage() as events:
                start = time.perf_counter()
                for iteration in range(steps):
                    events.iter = iteration
                    events.put_scalars(**metrics)
                    if period and (iteration + 1) % period == 0:
                        events.rows(period)
                return time.perf_counter() - start

        return run

    runs = {
        "put 10 floats": puts(values, 0),
        "put 10 tensors": puts(tensors, 0),
        "put 10 floats, read every 20": puts(values, 20),
    }
    seconds = interleaved(runs, args.steps or 20_000, args.rounds)
    return {name: {"us_per_step": round(value * 1e6, 2)} for name, value in seconds.items()}


COMMANDS = {"overhead": overhead, "hooks": hooks, "storage": storage}


def show(results: dict[str, Any], indent: str = "") -> None:
    """Print nested results as aligned lines."""
    width = max(len(name) for name in results)
    for name, value in results.items():
        if all(not isinstance(v, dict) for v in value.values()):
            print(f"{indent}{name:<{width}}  " + "  ".join(f"{key} {number:>10}" for key, number in value.items()))
        else:
            print(f"{indent}{name}")
            show(value, indent + "  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--steps", type=int, default=0, help="steps in a round (default: what suits the command)")
    parser.add_argument("--rounds", type=int, default=11, help="rounds, of which the median is taken")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("hookline").addHandler(logging.NullHandler())  # the console line is formatted, not shown
    results = COMMANDS[args.command](args)
    if args.json:
        print(json.dumps(results))
    else:
        show(results)


if __name__ == "__main__":
    main()
