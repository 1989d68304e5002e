"""A rank that creates its process group itself, twice: ``own_group.py rank file``."""

import sys

import torch.distributed as dist

from hookline.engine import comm

if __name__ == "__main__":
    rank, file = sys.argv[1:]
    for turn in range(2):
        dist.init_process_group("gloo", init_method=f"file://{file}_{turn}", rank=int(rank), world_size=2)
        print(comm.all_gather([comm.get_rank(), comm.get_world_size(), comm.is_main_process()]), flush=True)
        dist.destroy_process_group()
