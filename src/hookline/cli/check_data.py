"""Read every sample of the data, and list those that fail."""

import argparse

from hookline.command_line import add_options, slow_imports

EXAMPLE = "hookline check-data --config-file digits/mlp.yaml DATALOADER.NUM_WORKERS 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_options(parser, "config_file")
    parser.add_argument("--max", type=int, default=20, metavar="N", help="failing samples of a set to list (20)")
    add_options(parser, "opts")


def main(args: argparse.Namespace) -> int:
    """Check. The exit code is 1 if a sample or a batch fails."""
    with slow_imports():
        from hookline.engine import config_errors_exit
        from hookline.engine.options import merge_options
        from hookline.engine.program.check_data import check_all
    with config_errors_exit():
        return check_all(merge_options(args), args.max)
