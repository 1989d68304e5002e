"""Runs a function of a module in this folder in several ranks: see ``run_ranks`` in ``ranks.py``."""

import importlib
import sys
from datetime import timedelta
from pathlib import Path

from hookline.engine import launch

name, ranks, timeout, folder, *arguments = sys.argv[1:]
module, _, function = name.partition(":")
program = getattr(importlib.import_module(module), function)


def main():  # a function of __main__, which launch() runs in forked processes
    program(Path(folder), *arguments)


if __name__ == "__main__":
    launch(main, int(ranks), device="cpu", timeout=timedelta(seconds=float(timeout)))
