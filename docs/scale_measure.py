"""Measures what docs/scale.md shows of this machine, and writes it to docs/scale_measured.json.

    python docs/scale_measure.py              # all: collectives and steps of 2 and 4 processes, exchanges of 2 to 64
    python docs/scale_measure.py 2            # one part only: 2, 4 or exchanges

Leave the machine to it: the times of a step change with what else runs.
"""

import json
import os
import resource
import sys
import time
from argparse import Namespace
from datetime import date
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hookline.engine import launch
from hookline.engine.modeling import GPT

FILE = Path(__file__).with_name("scale_measured.json")
SIZES = (4096, 1 << 16, 1 << 20, 1 << 22)  # bytes
ROUNDS = 15
SHAPE = {"vocab_size": 256, "block_size": 64, "width": 192, "depth": 3, "heads": 4}
BATCH = 2  # texts per rank


def times(act) -> dict[str, float]:
    """Return the seconds of an act that all ranks begin together: "wall", of the slowest rank, and "cpu", the mean.

    CPU time, with all threads, changes little when other programs run. Both are the medians of the rounds.
    """
    walls, cpus = [], []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        start = time.perf_counter(), cpu()
        act()
        walls.append(time.perf_counter() - start[0])
        cpus.append(cpu() - start[1])
    ours: list = [None] * dist.get_world_size()
    dist.all_gather_object(ours, (median(walls[1:]), median(cpus[1:])))
    wall, used = zip(*ours, strict=True)
    return {"wall": max(wall), "cpu": sum(used) / len(used)}


def cpu() -> float:
    """Seconds that all threads of this process have computed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def collectives() -> dict[str, dict[str, dict[str, float]]]:
    """Seconds of each collective, by the bytes of the whole tensor."""
    ranks = dist.get_world_size()
    found: dict[str, dict[str, dict[str, float]]] = {"all_reduce": {}, "all_gather": {}, "reduce_scatter": {}}
    for size in SIZES:
        whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // ranks)
        for name, act in {
            "all_reduce": lambda: dist.all_reduce(whole),  # noqa: B023 (called in this round)
            "all_gather": lambda: dist.all_gather_single(whole, part),  # noqa: B023
            "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),  # noqa: B023
        }.items():
            found[name][str(size)] = times(act)
    return found


def steps() -> dict[str, dict[str, float]]:
    """Seconds of a training step with DDP and FSDP2, and of the same step if each rank is a group of its own."""
    tokens = torch.randint(256, (BATCH, SHAPE["block_size"]))
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "alone"))
    found = {}
    for name in ("ddp", "fsdp2"):
        for group in ("all", "alone"):
            torch.manual_seed(0)
            model: nn.Module = GPT(**SHAPE)
            if name == "ddp":
                model = DistributedDataParallel(model, process_group=mesh.get_group(group))
            else:
                for unit in [*model.blocks, model]:
                    fully_shard(unit, mesh=mesh[group])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

            def step(model=model, optimizer=optimizer) -> None:
                nn.functional.cross_entropy(model(tokens), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()

            found[f"{name}, {group}"] = times(step)
    return found


def on_ranks() -> dict[str, dict]:
    """What one number of ranks measures."""
    torch.set_num_threads(1)
    return {"collectives": collectives(), "steps": steps()}


def main() -> None:
    """Measure, and replace what is measured in the file."""
    parts = sys.argv[1:] or ["2", "4", "exchanges"]
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    for ranks in sorted({"2", "4"} & set(parts)):
        found.setdefault("steps", {})[ranks] = launch(on_ranks, int(ranks), device="cpu")
    if "exchanges" in parts:
        from hookline.benchmarks.scaling import scaling

        found["exchanges"] = scaling(Namespace(size=64, rounds=5))
    found["machine"] = {"cores": os.cpu_count(), "torch": torch.__version__, "date": str(date.today())}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
