"""A model that is large for its ranks: the peak of the memory of each rank, from the start of a run to its end."""

import ctypes
import gc
import re
from pathlib import Path

import torch
from meshes import config
from parts import write_result

from hookline.engine import DefaultTrainer, comm


def memory(field):
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


class Peak:
    """Notes the largest resident memory during each part, less than what was there at the start."""

    def __init__(self):
        gc.collect()
        self.start, self.parts = memory("VmRSS"), {}
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak

    def note(self, part):
        self.parts[part] = memory("VmHWM") - self.start
        Path("/proc/self/clear_refs").write_text("5")


def run(folder, width, depth, resume, *options):
    # As MALLOC_MMAP_THRESHOLD_=65536 does: glibc would keep freed memory of up to 32 MB a piece.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    train(folder, "small", "16", "1", "", Peak())  # imports what a run needs
    trainer, peak = train(folder, "large", width, depth, resume, Peak(), *options)
    whole = sum(parameter.numel() for parameter in trainer.model.parameters()) * 16
    write_result(folder, {"whole": whole, "peaks": peak.parts, "start": trainer.start_iter})


def train(folder, name, width, depth, resume, peak, *options):
    size = {"width": int(width), "depth": int(depth), "heads": 8, "vocab_size": 12, "block_size": 8}
    given = ["MODEL.NAME", "GPT", "MODEL.ARGS", repr(size), "DATALOADER.BATCH_SIZE", "4", "TEST.EVAL_PERIOD", "1"]
    given += ["SOLVER.BASE_LR", "0.0001", "SOLVER.WARMUP_ITERS", "0", "SOLVER.MAX_ITER", "2" if resume else "1"]
    given += ["PARALLEL.NAME", "fsdp2", "PARALLEL.ARGS.modules", "['TransformerBlock']", *options]
    torch.manual_seed(1 + comm.get_rank())
    trainer = DefaultTrainer(config(folder / name, *given))
    peak.note("build")
    trainer.resume_or_load(resume=bool(resume))
    peak.note("load")
    trainer.train()
    peak.note("train")
    return trainer, peak
