"""Run commands and the scripts of tools/ in the process of the tests."""

import runpy
import sys
from pathlib import Path

from loggers import unchanged_logging

from hookline.cli import main

ROOT = Path(__file__).parents[2]


def run_command(arguments, capture):
    """Run ``hookline`` with these arguments; return its exit code, standard output and standard error."""
    capture.readouterr()
    try:
        with unchanged_logging():
            code = main(list(map(str, arguments)))
    except SystemExit as end:
        code = end.code or 0
    return code, *capture.readouterr()


def run_tool(name, arguments, capture):
    """Run a script of tools/; return its exit code, standard output and standard error. ``capture``: capsys, capfd."""
    capture.readouterr()
    argv, sys.argv = sys.argv, [str(ROOT / "tools" / name), *map(str, arguments)]
    code = 0
    try:
        with unchanged_logging():
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = argv
    return code, *capture.readouterr()
