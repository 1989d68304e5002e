"""torchrun on one of several machines, except that its ranks are forked. It can be in a network namespace."""

import os
import runpy
import sys

import torch
from namespace import enter
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
    endpoint, least, most, ranks, restarts, *command = sys.argv[1:]
    # By default the fastest of the agents with the endpoint's address keeps the store.
    configs = {"is_host": os.environ["HAS_STORE"], "last_call_timeout": 1, "join_timeout": 60, "keep_alive_interval": 1}
    enter()
    config = LaunchConfig(
        int(least),
        int(most),
        int(ranks),
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        max_restarts=int(restarts),
        start_method="fork",
        local_addr=os.environ["ADDRESS"],
        rdzv_configs=configs,
    )
    elastic_launch(config, main)(*command)
