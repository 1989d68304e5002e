"""Ranks that fail, hang or leave early, each in its own way."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist
from parts import write_result

from hookline.engine import comm
from hookline.engine.parallel import processes

FOREVER = 60
processes._END_AFTER = processes._LEAVE = 0.5
processes.GRACE = processes._CAUSE = 1.0


def sleep_forever(folder):
    time.sleep(FOREVER)


def search(folder):
    re.search("(a+)+b", "a" * 60)  # takes years, and no other thread runs


def error(folder):
    raise ValueError("the reason")


def kill(folder):
    os.kill(os.getpid(), signal.SIGKILL)


def leave(folder):
    sys.exit(0)


def wait(folder):
    comm.synchronize()


def work_on(folder):
    """Wait until the process of rank 1 has ended."""
    pid, _ = json.loads((folder / "1.json").read_text())
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)


# What rank 1 does, and the others.
WAYS = {
    "raises": (error, sleep_forever),
    "is killed": (kill, wait),
    "sys.exit 0": (leave, wait),
    "hangs": (sleep_forever, lambda folder: comm.all_gather("objects")),
    "blocks": (search, wait),
    "leaves": (leave, work_on),
    "destroys": (lambda folder: dist.destroy_process_group(), lambda folder: dist.destroy_process_group()),
    "says why": (lambda folder: sys.exit("the reason"), wait),
    "stops": (lambda folder: sys.exit(75), lambda folder: sys.exit(75)),
    "is ended": (sleep_forever, sleep_forever),
}


def main(folder, how):
    # A child process of the rank, as a worker of a loader.
    child = os.fork() if how == "raises" else 0
    if how == "raises" and not child:
        time.sleep(FOREVER)
        os._exit(0)
    write_result(folder, [os.getpid(), child])
    comm.synchronize()
    WAYS[how][comm.get_rank() != 1](folder)
