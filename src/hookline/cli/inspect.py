"""Verify a checkpoint and show its content, or compare two.

Exit codes: 0: undamaged, or equal weights; 1: damaged, or different weights;
2: bad input.
"""

import argparse

from hookline.command_line import slow_imports

EXAMPLE = """hookline inspect output/digits_convnet
  hookline inspect output/first output/second"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", metavar="PATH", help="a file, or a folder such as a run's")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="a second checkpoint to compare with")
    parser.add_argument("--weights", choices=("model", "averaged"), default="model", help="which weights to compare")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Print the report."""
    with slow_imports():
        from hookline.engine import config_errors_exit
        from hookline.engine.export.inspection import report
    with config_errors_exit():
        whole, text = report(args.checkpoint, args.other, weights_from=args.weights, as_json=args.json)
        print(text)
        return 0 if whole else 1
