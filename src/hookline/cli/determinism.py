"""Run a few steps several times, and name what differs first.

Twice with equal settings, and once with another number of loader workers, each
in a process of its own: one rank, also for configs of several. Writes nothing.
If the runs differ, more runs find the operation and what to set. The exit code
is 1 then, and 0 if all are equal to the bit.
"""

import argparse

from hookline.command_line import add_options, slow_imports

EXAMPLE = "hookline determinism --config-file digits/convnet.yaml --steps 5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_options(parser, "config_file", "trainer")
    parser.add_argument("--steps", type=int, default=10, metavar="K", help="number of steps (%(default)s)")
    add_options(parser, "opts")


def main(args: argparse.Namespace) -> int:
    """Print the report. The exit code is 1 if the run is not deterministic."""
    with slow_imports():
        from hookline.engine import config_errors_exit
        from hookline.engine.replay.determinism import check_determinism
    with config_errors_exit():
        return check_determinism(args)
