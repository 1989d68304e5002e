"""One machine of several: ``machine.py url timeout processes machines machine_rank``."""

import sys
from datetime import timedelta

from hookline.engine import comm, config_errors_exit, launch


def main():
    print(comm.all_gather(comm.get_rank()), flush=True)


url, seconds, *numbers = sys.argv[1:]
gpus, machines, machine = map(int, numbers)
with config_errors_exit():
    limit = timedelta(seconds=float(seconds))
    launch(main, gpus, machines, machine, url, timeout=limit, device="cpu")
