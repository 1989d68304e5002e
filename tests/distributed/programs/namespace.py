"""Enters the network namespace ``NAMESPACE``, and runs a script there."""

import ctypes
import os
import runpy
import sys


def enter():
    """Move this process into the namespace, if there is one."""
    if namespace := os.environ.get("NAMESPACE"):
        with open(f"/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) == 0


if __name__ == "__main__":
    enter()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
