"""The command ``hookline``: one module per subcommand, imported when the subcommand runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import hookline
from hookline.command_line import ArgumentParser

__all__ = ["COMMANDS", "main", "parser_of"]

COMMANDS = {
    "train": "train",
    "eval": "eval",
    "predict": "predict",
    "export": "export",
    "inspect": "inspect",
    "plot": "plot",
    "compare": "compare",
    "replay": "replay",
    "samples": "samples",
    "diverge": "diverge",
