#!/usr/bin/env python
"""Measure the cost of the engine, relative to the same work written by hand.

    python tools/benchmark.py overhead      # time per step, relative to a hand-written loop: lean, default, compiled
    python tools/benchmark.py hooks         # time per step that 1 to 100 hooks add
    python tools/benchmark.py storage       # time per metric put into the storage
    python tools/benchmark.py loader        # batches per second, relative to a plain DataLoader
    python tools/benchmark.py checkpoint --size 100M    # saving and loading, relative to plain writing and reading
    python tools/benchmark.py length        # do steps get slower, or memory larger, in a long run?
    python tools/benchmark.py --compare all             # other installed trainers, on the tiny model

One thread. The candidates run in turns, so that a slow moment of the machine affects all of them; the medians are
reported. docs/performance.md explains the numbers.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks import steps
from benchmarks.checkpoint import checkpoint
from benchmarks.compare import compare
from benchmarks.loader import loader
from benchmarks.measure import CLOCKS, use_clock

COMMANDS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "overhead": steps.overhead,
    "hooks": steps.hooks,
    "storage": steps.storage,
    "loader": loader,
    "checkpoint": checkpoint,
    "length": steps.length,
}


def show(results: dict[str, Any], indent: str = "") -> None:
    """Print nested results as aligned lines."""
    width = max(len(name) for name in results)
    for name, value in results.items():
        if any(isinstance(inner, dict) for inner in value.values()):
            print(f"{indent}{name}")
            show(value, indent + "  ")
        else:
            print(f"{indent}{name:<{width}}  " + "  ".join(f"{key} {inner:>10}" for key, inner in value.items()))


def number(text: str) -> int:
    """``"100M"``, ``"2.5k"`` or ``"1000"``."""
    factors = {"k": 10**3, "m": 10**6, "b": 10**9}
    factor = factors.get(text[-1:].lower(), 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS, nargs="?", default="overhead")
    parser.add_argument("--compare", default="", metavar="NAMES", help="other trainers, comma-separated, or all")
    parser.add_argument("--steps", type=number, default=0, help="steps per round (default: depends on the command)")
    parser.add_argument("--rounds", type=number, default=11, help="number of rounds; the median is reported")
    parser.add_argument("--size", type=number, default=2_000_000, help="checkpoint: parameters, such as 100M")
    parser.add_argument("--folder", default=None, help="checkpoint: folder to write to (default: the temporary folder)")
    parser.add_argument("--puts", type=number, default=1_000_000, help="length: puts whose memory is measured")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a machine shared with others")
    parser.add_argument("--backend", default="inductor", help="overhead: backend of torch.compile")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    use_clock(args.clock)
    try:
        results = compare(args) if args.compare else COMMANDS[args.command](args)
    finally:
        use_clock("wall")
        torch.set_num_threads(threads)
    if args.json:
        print(json.dumps(results))
    else:
        show(results)


if __name__ == "__main__":
    main()
