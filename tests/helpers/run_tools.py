"""Run commands and the scripts of tools/ in the process of the tests."""

import runpy
import sys
from pathlib import Path

from loggers import unchanged_logging

from hookline.cli import main
from hookline.config import get_cfg
from hookline.engine import DefaultTrainer, default_setup

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


def train_synthetic(folder, *overrides):
    """Train configs/synthetic/mlp.yaml for 5 iterations."""
    cfg = get_cfg()
    cfg.merge_from_file(str(ROOT / "configs/synthetic/mlp.yaml"))
    cfg.merge_from_list(["OUTPUT_DIR", str(folder), "MODEL.DEVICE", "cpu", "SOLVER.MAX_ITER", 5])
    cfg.merge_from_list(["LOG.WRITERS", "[]", *overrides])
    with unchanged_logging():
        default_setup(cfg)
        DefaultTrainer(cfg).train()
