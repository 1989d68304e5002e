"""Compare runs: config differences, final and best metrics."""

import argparse

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

    table = compare_runs(read_runs(args.runs), args.metrics, args.sort)
    print({"text": table.text, "csv": table.csv, "markdown": table.markdown}[args.format](), end="")
