"""torchrun on one machine, except that its ranks are forked."""

import runpy
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def main(tool, *arguments):
    sys.argv = [tool, *arguments]
    try:
        runpy.run_path(tool, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


ranks, restarts, *command = sys.argv[1:]
config = LaunchConfig(
    1,
    1,
    int(ranks),
    run_id="none",
    rdzv_backend="c10d",
    rdzv_endpoint="localhost:0",
    max_restarts=int(restarts),
    start_method="fork",
)
elastic_launch(config, main)(*command)
