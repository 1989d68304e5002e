"""Write the predictions of weights for a config's test sets."""

import argparse

from hookline.command_line import PROCESSES, add_options

from . import train

EXAMPLE = "hookline predict --config-file digits/mlp.yaml MODEL.WEIGHTS path/to/model.pth"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_options(parser, "config_file", "trainer", "resume", *PROCESSES, "opts")
    parser.set_defaults(predict=True)


main = train.main
