"""torchrun on one of several machines, except that its rank is forked."""

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
    port, least, most, restarts, *command = sys.argv[1:]
    config = LaunchConfig(
        int(least),
        int(most),
        1,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        max_restarts=int(restarts),
        start_method="fork",
        local_addr="127.0.0.1",
        rdzv_configs={"last_call_timeout": 1, "join_timeout": 60, "keep_alive_interval": 1},
    )
    elastic_launch(config, main)(*command)
