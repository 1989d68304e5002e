"""Suggest a learning rate, after some steps with rising rates.

Nothing is written except the plot.
"""

import argparse

from hookline.command_line import add_options, slow_imports

EXAMPLE = "hookline find-lr --config-file digits/convnet.yaml --plot lr.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_options(parser, "config_file")
    parser.add_argument("--min-lr", type=float, default=1e-7, metavar="LR", help="the first rate (%(default)s)")
    parser.add_argument("--max-lr", type=float, default=10.0, metavar="LR", help="the last rate (%(default)s)")
    parser.add_argument("--num-iter", type=int, default=100, metavar="N", help="number of steps (%(default)s)")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw the losses (needs matplotlib)")
    add_options(parser, "opts")


def main(args: argparse.Namespace) -> None:
    """Print some of the losses, and the suggestion."""
    with slow_imports():
        from hookline.engine import config_errors_exit
        from hookline.engine.program.probes import probe_lr
    with config_errors_exit():
        sweep, text = probe_lr(args, args.min_lr, args.max_lr, args.num_iter)
        print(text)
        if args.plot:
            sweep.plot(args.plot)
