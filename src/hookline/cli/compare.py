"""Compare runs: config differences, final and best metrics."""

import argparse
import shutil
import sys

EXAMPLE = "hookline compare output/sweep --sort digits_test/accuracy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, or folders that contain some")
    parser.add_argument(
        "--metrics", nargs="+", default=[], metavar="NAME", help="names or patterns (default: evaluations and the loss)"
    )
    parser.add_argument(
        "--sort", default="", metavar="NAME", help="a metric, the best run first, or a key of the config"
    )
    parser.add_argument("--format", choices=("text", "csv", "markdown"), default="text", help="(default: text)")


def main(args: argparse.Namespace) -> None:
    """Print the table."""
    from hookline.runs import compare_runs, read_runs

    runs = read_runs(args.runs)
    table = compare_runs(runs, args.metrics, args.sort)
    if args.format == "text":
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(table.text(width), end="")
    else:
        print(table.csv() if args.format == "csv" else table.markdown(), end="")
