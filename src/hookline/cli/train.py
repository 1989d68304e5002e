"""Train the model that a config describes."""

import argparse

from hookline.command_line import PROCESSES, add_options, slow_imports

EXAMPLE = """hookline train --config-file digits/convnet.yaml SOLVER.BASE_LR 0.01
  torchrun --nproc-per-node 2 -m hookline train --config-file digits/mlp.yaml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_options(parser, "config_file", "trainer", "resume", "dry_run", "fast_dev_run", *PROCESSES, "opts")


def main(args: argparse.Namespace) -> None:
    """Train."""
    with slow_imports():
        from hookline.engine.program.run import run_trainer
    run_trainer(args)
