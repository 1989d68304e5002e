"""What a GPU must show to be fast: steps, saves and memory, relative to the loop by hand."""

import argparse
import gc
import importlib.util
import math
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...config import CfgNode
from ...engine.modeling import GPT
from ...engine.program.estimate import Transformer, flops_per_token, multiplied_parameters
from ...hooks.watching.flops import known_peak
from .. import peers as others
from ..checkpoint import checkpoint as saves
from ..measure import Run, interleaved, timed
from .report import Report, Skip
from .work import by_hand, convnet, first_losses, gpt, mlp, plain, trainer_of, with_keys

__all__ = ["checkpoint", "memory", "peers", "steps"]

WAYS: dict[str, list[Any]] = {
    "default": [],
    "MODEL.COMPILE": ["MODEL.COMPILE.ENABLED", True],
    "SOLVER.COMPILE_STEP": ["SOLVER.COMPILE_STEP", True],
    "SOLVER.COMPILE_STEP, 4 steps a call": ["SOLVER.COMPILE_STEP", True, "SOLVER.COMPILE_STEP_ARGS.steps", 4],
    "SOLVER.CUDA_GRAPH": ["SOLVER.CUDA_GRAPH", True],
    "MODEL.CHANNELS_LAST": ["MODEL.CHANNELS_LAST", True],
}
_ONLY_FOR = {"MODEL.CHANNELS_LAST": "convnet", "SOLVER.COMPILE_STEP, 4 steps a call": "mlp"}
MORE_MEMORY = 8e6  # bytes; the budget of docs/performance.md


def steps(report: Report, name: str) -> None:
    """Each way of running a step: the losses of the ordinary one, and its time over that of the loop by hand."""
    cfg = {"mlp": mlp, "convnet": convnet, "gpt": gpt}[name](report)
    tolerance = 5e-2 if cfg.SOLVER.AMP.ENABLED else 1e-3
    runs: dict[str, Run] = {"by hand": by_hand(cfg)}
    expected: list[float] = []
    for way, keys in WAYS.items():
        if _ONLY_FOR.get(way, name) != name:
            continue
        with report.attempt(way, report_success=False):
            trainer = trainer_of(_for_way(cfg, way, keys, report), report.folder())
            losses = first_losses(trainer, 30)  # graphs are compiled and captured, and the warm-up of the rate began
            expected = expected or losses
            for i, (found, loss) in enumerate(zip(losses, expected, strict=True)):
                assert math.isclose(found, loss, rel_tol=tolerance), f"loss {found}, not {loss}, at iteration {i}"
            runs[way] = timed(trainer)
    _report_times(report, runs, cfg)


def _for_way(cfg: CfgNode, way: str, keys: list[Any], report: Report) -> CfgNode:
    if way == "SOLVER.CUDA_GRAPH":
        report.needs_cuda("CUDA graphs")
    if "COMPILE" in way:
        if not report.cuda:  # seconds of compiling add nothing to a trial
            name = "MODEL.COMPILE.ARGS.backend" if way == "MODEL.COMPILE" else "SOLVER.COMPILE_STEP_ARGS.backend"
            keys = [*keys, name, "aot_eager"]
        elif not (importlib.util.find_spec("triton") and any(map(shutil.which, ("cc", "gcc", "clang")))):
            raise Skip("torch.compile needs triton and a C compiler")
    return with_keys(cfg, keys)


def peers(report: Report) -> None:
    """Other trainers on the GPT, in their leanest set-up, those that are installed."""
    cfg = gpt(report)
    runs: dict[str, Run] = {"by hand": by_hand(cfg)}
    with report.attempt("hookline, default", report_success=False):
        runs["hookline, default"] = timed(trainer_of(cfg, report.folder()))
    task = others.Task(partial(plain, cfg), cpu=not report.cuda, half=cfg.SOLVER.AMP.ENABLED)
    for name, function in {"lightning": others.lightning, "accelerate": others.accelerate}.items():
        with report.attempt(f"{name}, lean", report_success=False):
            if not others.installed(name):
                raise Skip("not installed")
            run = function(report.folder(), task)["lean"]
            run(1)
            runs[f"{name}, lean"] = run
    _report_times(report, runs, cfg)


def _report_times(report: Report, runs: dict[str, Run], cfg: CfgNode) -> None:
    count, rounds = (2, 1) if not report.cuda else _lengths(runs["by hand"])
    seconds = interleaved(runs, count, rounds)
    tokens, flops = _tokens_and_flops(cfg)
    peak = known_peak(torch.device(report.device)) if cfg.SOLVER.AMP.ENABLED else None
    for way, value in seconds.items():
        numbers: dict[str, Any] = {"ms": round(value * 1e3, 3), "ratio": round(value / seconds["by hand"], 3)}
        if tokens:
            numbers["tokens_per_s"] = round(tokens / value)
        if tokens and peak:
            numbers["mfu"] = round(flops * tokens / value / peak, 3)
        report.passed(way, **numbers)


def _lengths(run: Run) -> tuple[int, int]:
    """Steps in a round, and rounds: about 0.3 s a round, fewer rounds if a step is slow."""
    run(5)
    step = run(5) / 5
    return max(5, int(0.3 / step)), 7 if step < 0.01 else 3


def _tokens_and_flops(cfg: CfgNode) -> tuple[int, float]:
    """Tokens in a step and FLOPs per token; 0 if the model is no language model."""
    if cfg.MODEL.NAME != "GPT":
        return 0, 0.0
    with torch.device("meta"):
        model = GPT(**cfg.MODEL.ARGS)
    shape = Transformer.of(model)
    assert shape is not None
    per_token = flops_per_token(multiplied_parameters(model), shape.depth, shape.width, shape.block_size)
    return cfg.DATALOADER.BATCH_SIZE * shape.block_size, per_token


def memory(report: Report) -> None:
    """The peak of allocated memory in a default run, over the loop by hand."""
    for name, config in {"MLP": mlp, "ConvNet": convnet, "GPT": gpt}.items():
        with report.attempt(f"memory, {name}") as numbers:
            report.needs_cuda("counts the GPU's memory")
            cfg = with_keys(config(report), ["OUTPUT_DIR", report.folder()])
            by_hand(cfg)(1)  # allocates what libraries keep
            hand = _peak(by_hand, cfg, 10)
            default = _peak(_default, cfg, 30)
            numbers.update(by_hand_mb=round(hand / 1e6, 1), more_mb=round((default - hand) / 1e6, 1))
            assert default - hand <= MORE_MEMORY, f"{default - hand} bytes more than the loop by hand"


def _default(cfg: CfgNode) -> Callable[[int], Any]:
    return partial(first_losses, trainer_of(cfg, cfg.OUTPUT_DIR))


def _peak(make: Callable[[CfgNode], Callable[[int], Any]], cfg: CfgNode, steps: int) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    make(cfg)(steps)
    return torch.cuda.max_memory_allocated() - before


def checkpoint(report: Report) -> None:
    """Saving and loading 1 GB from the GPU, over writing and reading as many bytes."""
    size, rounds = (83_000_000, 3) if report.cuda else (2000, 1)
    with report.attempt("saves", report_success=False):
        found = saves(argparse.Namespace(size=size, folder=".", rounds=rounds), report.device)
        file_mb = found.pop("size")["file_mb"]
        for name, numbers in found.items():
            report.passed(f"{name} ({file_mb} MB)", **numbers)
