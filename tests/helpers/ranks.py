"""Start the processes of tests: ranks, the command line, torchrun."""

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forker import forker

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "train_net.py"
HOOKLINE = ROOT / "tests/helpers/hookline_command.py"
SYNTHETIC = ROOT / "configs" / "synthetic" / "mlp.yaml"
PROGRAMS = ROOT / "tests/distributed/programs"


def environment_in(folder, **more):
    """The environment of a process in ``folder``, which can import the modules in ``programs`` and in its folder."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PROGRAMS}{os.pathsep}{folder}", **more}


def start(arguments, folder, apart=False, **environment):
    """Start a process in ``folder``, in its own session. Standard error goes to standard output unless ``apart``."""
    return subprocess.Popen(
        [str(argument) for argument in arguments],
        cwd=folder,
        env=environment_in(folder, **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if apart else subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def fork(arguments, folder, apart=False, log=None, **environment):
    """Fork a Python script, which is much faster (see ``forker.py``). Its ranks are forked as well."""
    interpreter, *command = arguments
    assert interpreter == sys.executable
    return forker.start(command, folder, environment_in(folder, **environment), apart=apart, log=log)


def finish(process, timeout=200):
    """Wait for a process; returns its exit code and output, and standard error if that is apart."""
    try:
        output, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it did not end:\n{process.communicate()}") from None
    return (process.returncode, output) if error is None else (process.returncode, output, error)


def complete(arguments, folder, code=0, **environment):
    """Fork a Python script, assert its exit code, and return its output."""
    ended, output = finish(fork(arguments, folder, **environment))
    assert ended == code, output
    return output


def wait_for(process, *files):
    """Wait until a running process has written some files."""
    end = time.monotonic() + 150
    while not all(file.exists() and file.stat().st_size for file in files):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def start_ranks(program, ranks, folder, *arguments, rank_timeout=60):
    """Start what :func:`run_ranks` runs; return the process of ``launch()``."""
    folder.mkdir(exist_ok=True)
    return fork([sys.executable, PROGRAMS / "run.py", program, ranks, rank_timeout, folder, *arguments], folder)


def run_ranks(program, ranks, folder, *arguments, timeout=200, rank_timeout=60):
    """Run ``function(folder, *arguments)`` in several forked ranks; see ``programs/run.py``.

    Args:
        program: ``"module:function"`` in the folder ``programs``, or a module whose ``check_*`` are run.
        timeout: seconds until the test gives up.
        rank_timeout: the timeout that ``launch()`` gets.

    Returns:
        The exit code, the output, and the result of each rank (``parts.write_result``), or None.
    """
    process = start_ranks(program, ranks, folder, *arguments, rank_timeout=rank_timeout)
    exit_code, output = finish(process, timeout)
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return exit_code, output, [json.loads(file.read_text()) if file.exists() else None for file in files]


def checks(module, ranks):
    """Return a fixture and a test for the functions ``check_*(folder)`` of a program.

    The ranks start once and run the functions in their order. After one that fails the others are not run.
    """
    names = re.findall(r"^def check_(\w+)", (PROGRAMS / f"{module}.py").read_text(), re.MULTILINE)

    @pytest.fixture(scope="module")
    def checked(tmp_path_factory):
        folder = tmp_path_factory.mktemp(module)
        return folder, run_ranks(module, ranks, folder)[1]

    @pytest.mark.parametrize("name", names)
    def test(checked, name):
        folder, output = checked
        assert len(list(folder.glob(f"check_{name}.*"))) == ranks, output

    return checked, test


def free_port():
    """A free port that the system gives to no other process in the meantime: it gives those from 32768 on."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def tool(*arguments):
    """The command line of tools/train_net.py."""
    return [sys.executable, TOOL, *arguments]


def torchrun(ranks, *arguments, options=()):
    """The command line of tools/train_net.py under torchrun."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *options]
    return [*run, TOOL, *arguments]


def forked_torchrun(ranks, *arguments, restarts, folder):
    """Start a torchrun agent in ``folder`` that forks its ranks."""
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if restarts else {}
    return fork([sys.executable, PROGRAMS / "elastic.py", ranks, restarts, TOOL, *arguments], folder, **store)


def rows(folder, leave_out=("time", "data_time", "eta_seconds", "slowest_rank")):
    """The rows of a run's metrics.json, without the values that differ from run to run."""
    lines = (folder / "metrics.json").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(leave_out)} for line in lines
    ]
