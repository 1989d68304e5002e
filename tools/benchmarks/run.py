#!/usr/bin/env python
"""Measure hookline against the same work written by hand, or this checkout against another one.

    python tools/benchmarks/run.py step
    python tools/benchmarks/run.py step tiny --core 1 --against ../before

A ratio is the time over that of the first row. docs/performance.md explains the numbers.
"""

import argparse
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

from measure import CHECKOUT, Worker, in_turns, table

BENCHMARKS = {
    "step": "a training step: a tiny model, the digits, a compiled step, a GPU if there is one",
    "checkpoint": "saving and loading",
    "ranks": "a step on two ranks: DDP and FSDP2",
    "peers": "a step of Lightning and transformers, if they are installed",
}


def main() -> int:
    names = "\n".join(f"  {name:<12}{what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"names:\n{names}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("name", choices=BENCHMARKS, metavar="NAME", help="what to measure: see below")
    add("groups", nargs="*", metavar="GROUP", help="parts of it (default: all)")
    add("--against", type=Path, metavar="PATH", help="a checkout of another commit, measured in turns with this one")
    add("--steps", type=int, metavar="N", help="steps per round (default: depends on the group)")
    add("--rounds", type=int, default=5, metavar="N", help="rounds; the median is shown (default: %(default)s)")
    add("--core", default="", metavar="N", help="run on this core only (Linux)")
    args = parser.parse_args()
    if args.against and not (args.against / "src/hookline").is_dir():
        parser.error(f"--against {args.against}: not a checkout of hookline, which has a folder src/hookline")
    benchmark = import_module(args.name)
    if unknown := set(args.groups) - set(benchmark.GROUPS):
        parser.error(f"{args.name} has no {', '.join(sorted(unknown))}, but {', '.join(benchmark.GROUPS)}")
    checkouts = [CHECKOUT, *([args.against.resolve()] if args.against else [])]
    ranks = getattr(benchmark, "RANKS", 1)
    failed = False
    for group in args.groups or benchmark.GROUPS:
        steps = args.steps or benchmark.GROUPS[group][0]
        print(f"{args.name}, {group}: {args.rounds} rounds, steps in each: {steps}", flush=True)
        try:
            with ExitStack() as stack:
                workers = [Worker(path, args.name, group, args.core, ranks) for path in checkouts]
                for worker in workers:
                    stack.callback(worker.close)
                print("\n".join(table(in_turns(workers, steps, args.rounds))), flush=True)
        except RuntimeError as error:
            failed = True
            print(f"failed: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
