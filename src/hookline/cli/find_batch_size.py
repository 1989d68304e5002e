"""Find the largest batch that fits into memory.

Tries growing batches: on a GPU until it is out of memory, on the CPU up to
--memory.
"""

import argparse

from hookline.command_line import add_options, slow_imports

EXAMPLE = "hookline find-batch-size --config-file digits/mlp.yaml --memory 4GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_options(parser, "config_file")
    parser.add_argument("--memory", metavar="SIZE", help="on the CPU: what the process may use")
    parser.add_argument("--max-size", type=int, metavar="N", help="the largest size to try (number of samples)")
    add_options(parser, "opts")


def main(args: argparse.Namespace) -> None:
    """Print the size."""
    with slow_imports():
        from hookline.engine import DefaultTrainer, config_errors_exit
        from hookline.engine.options import set_up_probe
        from hookline.engine.setup.find_batch_size import find_batch_size
    with config_errors_exit():
        print(
            f"DATALOADER.BATCH_SIZE {find_batch_size(DefaultTrainer(set_up_probe(args)), args.memory, args.max_size)}"
        )
