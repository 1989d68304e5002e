"""Searches that train some steps and write nothing: a learning rate, a batch size."""

import argparse

from ..defaults import DefaultTrainer
from ..options import set_up_probe
from ..setup.find_batch_size import find_batch_size
from ..setup.find_lr import LRSweep, find_lr

__all__ = ["probe_batch_size", "probe_lr"]


def probe_lr(args: argparse.Namespace, min_lr: float, max_lr: float, num_iter: int) -> tuple[LRSweep, str]:
    """Run :func:`find_lr` for ``--config-file`` and KEY VALUE pairs. Return its result, and a text for people."""
    trainer = DefaultTrainer(set_up_probe(args))
    trainer.resume_or_load(resume=False)  # MODEL.WEIGHTS
    sweep = find_lr(trainer, min_lr, max_lr, num_iter)
    rows = list(zip(sweep.lrs, sweep.losses, sweep.smoothed, strict=True))[:: max(1, len(sweep.lrs) // 20)]
    lines = [f"{'lr':>10}  {'loss':>10}  {'smoothed':>10}"]
    lines += ["  ".join(f"{value:10.4g}" for value in row) for row in rows]
    if sweep.suggestion is None:
        lines.append("No suggestion: the loss did not fall. Try more steps (--num-iter) or another range")
    elif trainer.cfg.SOLVER.OPTIMIZERS:
        factor = sweep.suggestion / trainer.cfg.SOLVER.BASE_LR
        lines.append(f"Suggestion: multiply SOLVER.BASE_LR and the BASE_LR of each optimizer by {factor:.3g}")
    else:
        lines.append(f"Suggestion: SOLVER.BASE_LR {sweep.suggestion:.3g}")
    return sweep, "\n".join(lines)


def probe_batch_size(args: argparse.Namespace, memory: str | None, max_size: int | None) -> int:
    """Run :func:`find_batch_size` for ``--config-file`` and KEY VALUE pairs."""
    return find_batch_size(DefaultTrainer(set_up_probe(args)), memory, max_size)
