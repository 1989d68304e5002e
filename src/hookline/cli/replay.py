"""Run a step of a run again, and report what happens in it.

Starts from the newest checkpoint before the step, and writes RUN/replay_N/.
"""

import argparse

from hookline.command_line import slow_imports

EXAMPLE = "hookline replay output/digits_convnet --iter 410"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("--iter", type=int, required=True, metavar="N", help="the step, as in metrics.json")
    parser.add_argument("--trainer", default="", metavar="NAME", help="the run's trainer, as my_trainer:Trainer")
    parser.add_argument("--ranks", type=int, default=0, metavar="R", help="number of processes (as the run had)")
    parser.add_argument("--set", nargs="+", default=[], metavar="X", help="what if: KEY VALUE pairs of the config")
    parser.add_argument(
        "--hook", action="append", default=[], metavar="NAME", help="a hook that takes part, as module:Class"
    )
    parser.add_argument("--pdb", action="store_true", help="start Python's debugger before the step")
    parser.add_argument("--profile", action="store_true", help="write a Chrome trace of the step")
    parser.add_argument("--save", action="store_true", help="write weights, optimizer and batch before the update")


def main(args: argparse.Namespace) -> None:
    """Print the report."""
    with slow_imports():
        from hookline.engine import config_errors_exit
        from hookline.engine.replay.command import replay_in_processes
    with config_errors_exit():
        replay_in_processes(args)
