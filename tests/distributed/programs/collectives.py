"""Ranks exchange objects and numbers, and wait for each other."""

import os
import time

import torch
from results import write_result
from torch import nn

from hookline.config import ConfigError
from hookline.engine import comm
from hookline.engine.checkpoint.sharded_checkpointer import ShardedCheckpointer
from hookline.engine.evaluation.metrics import collect


def collectives(folder):
    rank = comm.get_rank()
    results = {
        "ranks": [rank, comm.get_world_size(), comm.get_local_rank(), comm.get_local_size()],
        "environment": [os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]],
        "broadcast": comm.broadcast_object({"from": rank}, src=1),
        "sum": comm.all_reduce_sum(rank + 1),
        "sum of floats": comm.all_reduce_sum(rank + 0.5),
        "sum of tensors": comm.all_reduce_sum(torch.tensor([1.5 + rank])).tolist(),
    }
    with comm.main_process_first():
        cache = folder / "cache"
        results["found the cache"] = cache.exists()
        if rank == 0:
            time.sleep(0.3)
            cache.write_text("expensive")
    with comm.main_process_first(local=False):  # the same name a second time
        pass
    group = comm.get_local_process_group()
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=group)
    results["ranks of this machine"] = total.item()
    comm.create_local_process_group(1)
    results["a group a rank"] = torch.distributed.get_world_size(comm._local_group(torch.distributed.group.WORLD, 1))
    for _ in range(3):
        comm.barrier("a", timeout=20)
    if rank == 0:
        try:
            comm.barrier("the evaluation", timeout=0.5)
        except TimeoutError as error:
            results["missing"] = str(error)
    results["main process"] = comm.on_main_process(lambda: rank)
    results["gathered"] = collect([torch.full((rank + 1,), rank)]).tolist()

    def fail():
        raise ConfigError(f"rank {rank} cannot read the file")

    try:
        comm.on_main_process(fail)
    except ConfigError as error:
        results["error of the main process"] = str(error)
    comm.synchronize()
    write_result(folder, results)


def timeouts(folder):
    checkpointer = ShardedCheckpointer(nn.Linear(1, 1), str(folder))
    groups = [torch.distributed.group.WORLD, comm.object_group(), comm.get_local_process_group(), checkpointer._group]
    cpu = torch.device("cpu")
    limits = [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]
    write_result(folder, [*limits, comm.timeout().total_seconds()])
