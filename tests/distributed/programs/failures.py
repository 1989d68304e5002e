"""Ranks that fail, hang or leave early, each in its own way."""

import os
import signal
import sys
import time
from pathlib import Path

from results import write_result

from hookline.engine import comm
from hookline.engine.ranks import process

FOREVER = 60


def ends(folder, how):
    process._GRACE = 1.0  # not 4 seconds
    write_result(folder, os.getpid())
    comm.synchronize()
    if comm.get_rank() == 1:
        if how == "raises":
            raise ValueError("the reason")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "is late":
            time.sleep(2)
    if how == "stops":
        raise SystemExit(75)
    if how == "is late":
        return
    if how == "is killed":
        comm.synchronize()
    time.sleep(FOREVER)


def sleep_forever():
    time.sleep(FOREVER)


def sleeps(folder):
    write_result(folder, os.getpid())
    sleep_forever()


def hangs(folder):
    process._GRACE = 0.2
    comm.synchronize()
    write_result(folder, os.getpid())
    if comm.get_rank() == 1:
        sleep_forever()
    comm.all_gather("objects")


def aborts(folder):
    process._GRACE = 1.0
    comm.synchronize()
    if comm.get_rank() == 1:
        sleep_forever()
    os.abort()


def leaves(folder, how):
    process._GRACE, process._LEAVE, process._ANSWER = 0.5, 0.5, 1
    write_result(folder, os.getpid())
    comm.synchronize()
    if comm.get_rank() == 1:
        function, _, code = how.partition(" ")
        if function == "os._exit":
            os._exit(int(code))
        if function == "sys.exit":
            sys.exit(int(code))
        return
    comm.synchronize()


def works_on(folder):
    process._LEAVE = 0.1
    write_result(folder, os.getpid())
    comm.synchronize()
    if comm.get_rank() == 1:
        sys.exit(0)
    while Path("/proc", (folder / "1.json").read_text()).exists():
        time.sleep(0.01)


def left_behind(folder):
    child = os.fork()
    if not child:
        time.sleep(FOREVER)
        os._exit(0)
    write_result(folder, child)
    comm.synchronize()
    if comm.get_rank() == 1:
        raise ValueError("the reason")
    time.sleep(FOREVER)
