#!/usr/bin/env python
"""Measure hookline against the same work written by hand.

    python tools/benchmarks/run.py step
    python tools/benchmarks/run.py step tiny --core 1 --checkout ../before

A ratio is the time over that of the first row. docs/performance.md explains the numbers.
"""

import argparse
import os
import sys
import tempfile
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

BENCHMARKS = {
    "step": "a training step: a tiny model, the digits, a GPU if there is one",
    "checkpoint": "saving and loading",
    "ranks": "a step on two ranks: DDP and FSDP2",
    "peers": "a step of Lightning and transformers, if they are installed",
}


def parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<12}{what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"names:\n{names}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("name", choices=BENCHMARKS, metavar="NAME", help="what to measure: see below")
    add("groups", nargs="*", metavar="GROUP", help="parts of it (default: all)")
    add("--checkout", type=Path, metavar="PATH", help="measure the hookline of another checkout, in its own process")
    add("--steps", type=int, metavar="N", help="steps per round (default: depends on the group)")
    add("--rounds", type=int, default=5, metavar="N", help="rounds; the median is shown (default: %(default)s)")
    add("--core", type=int, metavar="N", help="run on this core only (Linux)")
    return parser


def use_checkout(checkout: Path, folder: Path) -> None:
    """Make a package ``hookline`` of the folders of a checkout, and import that one."""
    for part in (*(checkout / "src/hookline").iterdir(), *map(checkout.joinpath, ("config", "hooks", "engine"))):
        (folder / part.name).symlink_to(part.resolve())
    (folder / "configs").symlink_to((checkout / "configs").resolve())
    paths = [str(folder.parent), os.environ.get("PYTHONPATH", "")]  # also for other ranks
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.insert(0, str(folder.parent))


def measure(args: argparse.Namespace) -> None:
    """Print the tables of the groups, on rank 0. What runs print is discarded."""
    import torch
    from measure import in_turns, table

    from hookline.engine import comm

    torch.set_num_threads(1)
    benchmark = import_module(args.name)
    for group in args.groups or benchmark.GROUPS:
        usual, make = benchmark.GROUPS[group]
        steps = args.steps or usual
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing, redirect_stdout(nothing):
            times = in_turns(make(comm.all_gather(folder)[0]), steps, args.rounds)
            comm.synchronize()
        if comm.is_main_process():
            print(f"{args.name}, {group}: {args.rounds} rounds, steps in each: {steps}", *table(times), sep="\n")


def main() -> None:
    args = parser().parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    with tempfile.TemporaryDirectory() as folder:
        if args.checkout:
            Path(folder, "hookline").mkdir()
            use_checkout(args.checkout, Path(folder, "hookline"))
        from hookline.engine import launch

        benchmark = import_module(args.name)
        if unknown := set(args.groups) - set(benchmark.GROUPS):
            parser().error(f"{args.name} has no {', '.join(sorted(unknown))}, but {', '.join(benchmark.GROUPS)}")
        launch(measure, getattr(benchmark, "RANKS", 1), device="cpu", args=(args,))


if __name__ == "__main__":
    main()
