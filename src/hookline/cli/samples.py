"""Say which samples a step reads, or which steps read one.

From the sampler alone: nothing is trained, and the step may be in the future.
"""

import argparse

from hookline.command_line import slow_imports

EXAMPLE = "hookline samples output/digits_convnet --iter 410"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--iter", type=int, metavar="N", help="print the indices of the samples in this step's batch")
    group.add_argument("--sample", type=int, metavar="I", help="print all steps that read this sample")


def main(args: argparse.Namespace) -> None:
    """Print numbers, one per line."""
    with slow_imports():
        from hookline.engine import config_errors_exit
        from hookline.engine.replay.samples import each_iteration_of, samples_at
    with config_errors_exit():
        numbers = each_iteration_of(args.run, args.sample) if args.iter is None else samples_at(args.run, args.iter)
        for number in numbers:
            print(number, flush=True)
