"""A torchrun agent, except that its ranks are forked: ``elastic.py ranks restarts command``.

The environment variable AGENT has its place among several agents, as JSON.
"""

import json
import os
import runpy
import sys

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def main(tool, *arguments):
    torch.multiprocessing._prctl_pr_set_pdeathsig(0)  # torchrun's processes get no signal when it is killed
    sys.argv = [tool, *arguments]
    try:
        runpy.run_path(tool, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    ranks, restarts, *command = sys.argv[1:]
    place = {"machines": [1, 1], "rdzv_endpoint": "localhost:0", **json.loads(os.environ.get("AGENT", "{}"))}
    options = {"run_id": "test", "rdzv_backend": "c10d", "max_restarts": int(restarts), "start_method": "fork"}
    elastic_launch(LaunchConfig(*place.pop("machines"), int(ranks), **options, **place), main)(*command)
