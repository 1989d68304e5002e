"""Say where two runs differ first: the step, and what in it.

If metrics differ, both runs are replayed. Writes nothing into their folders.
Exit codes: 0: equal runs; 1: they differ; 2: bad input.
"""

import argparse

from hookline.command_line import slow_imports

EXAMPLE = "hookline diverge output/first output/second"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("other", metavar="OTHER", help="the folder of the run to compare with")
    parser.add_argument("--trainer", default="", metavar="NAME", help="the runs' trainer, as my_trainer:Trainer")
    parser.add_argument("--no-replay", action="store_true", help="only compare the files")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Print the report."""
    with slow_imports():
        from hookline.engine import config_errors_exit
        from hookline.engine.replay.diverge import diverge, diverge_text
        from hookline.engine.replay.report import json_text
    with config_errors_exit():
        report = diverge(args.run, args.other, trainer=args.trainer, replays=not args.no_replay)
        print(json_text(report) if args.json else diverge_text(report))
        return 0 if report["equal"] else 1
