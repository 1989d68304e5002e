"""Starts training processes quickly: imports everything once, then forks one for each line on its standard input.

    python forker.py SCRIPT

Each line is ``{"argv": [...], "log": FILE}``; answered by the new process's number, and, when it has ended, by its exit
status (negative: the signal that ended it). The forked process runs SCRIPT as ``__main__``, as a shell would have it.
"""

import json
import os
import runpy
import sys

import sklearn.datasets  # noqa: F401
import torch.utils.tensorboard  # noqa: F401

import hookline.engine  # noqa: F401


def run(script: str, argv: list[str], log: str) -> None:
    """Be that process."""
    # A session of its own, so that its loader workers can be found and ended with it.
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(out, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 0
    sys.argv = [script, *argv]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        run(sys.argv[1], order["argv"], order["log"])
    print(child, flush=True)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
