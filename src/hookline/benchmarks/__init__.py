"""Benchmarks of the engine, relative to the same work written by hand: ``hookline benchmark``.

One thread. The candidates run in turns, so that a slow moment of the machine affects all of them; the medians are
reported. docs/performance.md explains the numbers.
"""

import argparse
import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from . import steps
from .checkpoint import checkpoint
from .compare import compare
from .evaluation import evaluation
from .loader import loader
from .loaders import loaders
from .measure import use_clock

__all__ = ["measure_and_show", "show"]


def _later(module: str, function: str, args: argparse.Namespace) -> dict[str, Any]:
    """Call a function of a module that imports what others do not need: torch.distributed, or parts of Unix."""
    results: dict[str, Any] = getattr(import_module(f".{module}", __name__), function)(args)
    return results


_BENCHMARKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "overhead": steps.overhead,
    "hooks": steps.hooks,
    "storage": steps.storage,
    "loader": loader,
    "loaders": loaders,
    "evaluation": evaluation,
    "checkpoint": checkpoint,
    "start": lambda args: _later("start", "start", args),
    "resume": lambda args: _later("start", "resume", args),
    "memory": lambda args: _later("start", "memory", args),
    "compile_step": lambda args: _later("start", "compile_step", args),
    "length": steps.length,
    "ranks": lambda args: _later("ranks", "ranks", args),
    "scaling": lambda args: _later("scaling", "scaling", args),
}


def measure_and_show(args: argparse.Namespace) -> None:
    """Run what the options of ``hookline benchmark`` say, and print the results."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    use_clock(args.clock)
    try:
        results = compare(args) if args.compare else _BENCHMARKS[args.what](args)
    finally:
        use_clock("wall")
        torch.set_num_threads(threads)
    if args.json:
        print(json.dumps(results))
    else:
        show(results)


def show(results: dict[str, Any], indent: str = "") -> None:
    """Print nested results as aligned lines."""
    width = max(len(name) for name in results)
    for name, value in results.items():
        if any(isinstance(inner, dict) for inner in value.values()):
            print(f"{indent}{name}")
            show(value, indent + "  ")
        else:
            print(f"{indent}{name:<{width}}  " + "  ".join(f"{key} {inner:>10}" for key, inner in value.items()))
