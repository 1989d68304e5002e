"""Starting ranks in tests, with code of the test's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from forker import forker

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "train_net.py"
SYNTHETIC = ROOT / "configs" / "synthetic" / "mlp.yaml"
DIGITS = ROOT / "configs" / "digits" / "convnet.yaml"

HEADER = """
import json, os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch
from torch import nn
from hookline.config import ConfigError, get_cfg
from hookline.engine import comm, launch
"""
FOOTER = """
if __name__ == "__main__":
    ranks = int(sys.argv[1])
    folder = Path(sys.argv[2])
    limit = timedelta(seconds=globals().get("TIMEOUT", 60))
    launch(main, ranks, args=(folder,), device="cpu", timeout=limit)
"""


def environment_in(folder, **more):
    """The variables of a process in ``folder``, which finds the modules that stand there."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **more}


def start(arguments, folder, **environment):
    """A process in ``folder``, with what modules stand there; its two outputs are one."""
    return subprocess.Popen(
        [str(argument) for argument in arguments],
        cwd=folder,
        env=environment_in(folder, **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def fork(arguments, folder, **environment):
    """The same for a Python script, in a small part of the time: see ``forker.py``. Its ranks are forks as well."""
    interpreter, *command = arguments
    assert interpreter == sys.executable
    return forker.start(command, folder, environment_in(folder, **environment))


def finish(process, timeout=200):
    """Exit code and output of a process."""
    try:
        output = process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0]
        raise AssertionError(f"it did not end:\n{output}") from None
    return process.returncode, output


def run_ranks(code, ranks, folder, timeout=200):
    """Run ``main(folder)``, which ``code`` defines, in so many ranks, all of them forked.

    Returns:
        The exit code, the output, and what each rank left as ``<rank>.json`` in ``folder``; None where there is none.
    """
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(HEADER + code + FOOTER)
    exit_code, output = finish(fork([sys.executable, script, ranks, folder], folder), timeout)
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return exit_code, output, [json.loads(file.read_text()) if file.exists() else None for file in files]


def tool(*arguments):
    """The command line of tools/train_net.py."""
    return [sys.executable, TOOL, *arguments]


def torchrun(ranks, *arguments, options=()):
    """The same under torchrun."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *options]
    return [*run, TOOL, *arguments]


# What torchrun does with its arguments, but that the ranks are forked.
ELASTIC = """
import runpy, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def main(tool, *arguments):
    sys.argv = [tool, *arguments]
    try:
        runpy.run_path(tool, run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code

ranks, restarts, *command = sys.argv[1:]
config = LaunchConfig(
    1, 1, int(ranks), run_id="none", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=int(restarts),
    start_method="fork",
)
elastic_launch(config, main)(*command)
"""


def forked_torchrun(ranks, *arguments, restarts, folder):
    """A process in ``folder`` that is torchrun's agent, and starts the same as torchrun does, but by forks."""
    script = folder / "elastic.py"
    script.write_text(ELASTIC)
    return fork([sys.executable, script, ranks, restarts, TOOL, *arguments], folder)


def rows(folder, leave_out=("time", "data_time", "eta_seconds", "ranks/")):
    """The rows of a run's metrics.json, without what differs from run to run."""
    lines = (folder / "metrics.json").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(leave_out)} for line in lines
    ]
