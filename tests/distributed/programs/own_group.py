"""A rank of a process group that the script creates itself: ``own_group.py rank file collectives|again``."""

import json
import os
import sys

import numpy as np
import torch
import torch.distributed as dist

from hookline.engine import comm


def collectives(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    np.random.seed(rank)
    names = ("a", "b") if rank == 0 else ("b", "a")
    values = {"a": 1.0 + rank, "b": 10.0 * (1 + rank)}
    reduced = comm.reduce_dict({name: torch.tensor(values[name]) for name in names})
    summed = comm.reduce_dict({name: torch.tensor(values[name]) for name in names}, average=False)
    comm.synchronize()
    results = {
        "rank": [comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), comm.get_local_size()],
        "main": comm.is_main_process(),
        "all_gather": comm.all_gather({"rank": rank}),
        "gather": comm.gather("x" * (rank + 1), dst=1),
        "seed": comm.shared_random_seed(),
        "mean": {name: value.item() for name, value in reduced.items()},
        "sum": {name: value.item() for name, value in summed.items()},
    }
    print(json.dumps(results), flush=True)
    os._exit(0)


def again(rank, file):
    for turn in range(2):
        dist.init_process_group("gloo", init_method=f"file://{file}_{turn}", rank=rank, world_size=2)
        print(comm.all_gather(rank), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    number, path, what = sys.argv[1:]
    {"collectives": collectives, "again": again}[what](int(number), path)
