"""Runs a function of a module in this folder in several ranks, or all its ``check_*``: see ``ranks.py``."""

import importlib
import logging
import sys
from datetime import timedelta
from pathlib import Path

from hookline.engine import comm, launch

name, ranks, timeout, folder, *arguments = sys.argv[1:]
module, _, function = name.partition(":")
program = importlib.import_module(module)


def main():  # a function of __main__, which launch() runs in forked processes
    getattr(program, function)(Path(folder), *arguments)


def run_checks():
    logging.disable(logging.WARNING)
    for check, run in list(vars(program).items()):
        if check.startswith("check_") and run.__module__ == module:
            place = Path(folder, check)
            place.mkdir(exist_ok=True)
            run(place)
            comm.synchronize()
            Path(folder, f"{check}.{comm.get_rank()}").touch()


if __name__ == "__main__":
    launch(main if function else run_checks, int(ranks), device="cpu", timeout=timedelta(seconds=float(timeout)))
