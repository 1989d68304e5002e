"""What a GPU must show to be right: no step waits, copies overlap, precision, skipped updates, resume, staging."""

import json
import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config import CfgNode, ConfigError
from ...engine import DefaultTrainer, SimpleTrainer
from ...engine.checkpoint import Checkpointer
from ...engine.modeling.float8 import check_float8
from ...hooks import CallbackHook
from .report import Report, Skip
from .work import convnet, first_losses, mlp, train_without_waiting, trainer_of, with_keys

__all__ = ["amp", "float8", "nonfinite", "overlap", "prefetch", "resume", "staging", "waiting"]

KILLED_AT, LENGTH = 23, 40  # iterations of the run that is killed


def waiting(report: Report) -> None:
    """Between two writes no step waits for the GPU, in a run with its default hooks."""
    ways = {
        "float32": [],
        "bfloat16": ["SOLVER.AMP.ENABLED", True],
        "float16": ["SOLVER.AMP.ENABLED", True, "SOLVER.AMP.DTYPE", "float16"],
        "2 workers": ["DATALOADER.NUM_WORKERS", 2],
        "CUDA_GRAPH": ["SOLVER.CUDA_GRAPH", True],
    }
    for name, keys in ways.items():
        with report.attempt(f"no wait, {name}") as numbers:
            report.needs_cuda("only a GPU is waited for")
            if name == "bfloat16" and not report.half():
                raise Skip("this GPU has no bfloat16")
            cfg = with_keys(convnet(report), ["SOLVER.AMP.ENABLED", False, *keys])
            cfg.MODEL.ARGS.width = 16
            # Metrics are written after iterations 99 and 199; epochs, of 16 iterations, end in between.
            cfg.LOG.PERIOD, cfg.SOLVER.MAX_ITER, cfg.OUTPUT_DIR = 100, 220, report.folder()
            train_without_waiting(DefaultTrainer(cfg), first=100, last=198)
            numbers["steps"] = 99


def prefetch(report: Report) -> None:
    """Copies come from pinned memory; with workers they run on a stream of their own, during kernels."""
    for workers in (0, 2):
        what = f"{workers} workers: copies from pinned memory" + (", during kernels" if workers else "")
        with report.attempt(what) as numbers:
            report.needs_cuda("copies to a GPU")
            cfg = with_keys(convnet(report), ["DATALOADER.NUM_WORKERS", workers])
            found = overlap(_trace(trainer_of(cfg, report.folder()), report.folder() + ".json"))
            numbers.update(found)
            if not found["copies"]:
                raise Skip("the profiler sees no copies; it may need permissions (CUPTI)")
            assert found["pinned"] == found["copies"], f"of {found['copies']} copies {found['pinned']} are pinned"
            if workers:
                assert found["own_stream"] == found["copies"], "copies are on the stream of the kernels"
                assert found["overlap"] >= 0.5, f"only {found['overlap']} of the copying time is during kernels"


def _trace(trainer: DefaultTrainer, path: str) -> list[dict[str, Any]]:
    """Profile iterations 30 to 39, and return the trace's events."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities)

    def watch(trainer: Any) -> None:
        if trainer.iter == 30:
            profiler.start()
        if trainer.iter == 40:
            torch.cuda.synchronize()
            profiler.stop()

    trainer.register_hooks([CallbackHook(before_step=watch)])
    SimpleTrainer.train(trainer, 0, 45)
    profiler.export_chrome_trace(path)
    return list(json.loads(Path(path).read_text())["traceEvents"])


def overlap(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the copies to the GPU in a Chrome trace, and the share of their time in which a kernel ran.

    Copies below 100 kB are left out: learning rates, and scalars.
    """
    kernels, copies = [], []
    for event in events:
        if event.get("cat") == "kernel":
            kernels.append(event)
        elif event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"] and event["args"].get("bytes", 1e9) >= 1e5:
            copies.append(event)
    streams = {event["args"].get("stream") for event in kernels}
    total = sum(event["dur"] for event in copies)
    return {
        "copies": len(copies),
        "pinned": sum("Pinned" in event["name"] for event in copies),
        "own_stream": sum(event["args"].get("stream") not in streams for event in copies),
        "overlap": round(sum(_covered(event, kernels) for event in copies) / total, 2) if total else 0.0,
    }


def _covered(copy: Mapping[str, Any], kernels: Iterable[Mapping[str, Any]]) -> float:
    """The time of a copy during which a kernel ran."""
    start, end = copy["ts"], copy["ts"] + copy["dur"]
    covered, reached = 0.0, start
    for kernel in sorted(kernels, key=lambda event: event["ts"]):
        first, last = max(kernel["ts"], reached), min(kernel["ts"] + kernel["dur"], end)
        if last > first:
            covered, reached = covered + last - first, last
    return covered


def amp(report: Report) -> None:
    """The loss falls in mixed precision. The state of float16's scaler is part of ``resume``."""
    for dtype in ("bfloat16", "float16"):
        with report.attempt(f"AMP {dtype}: the loss falls") as numbers:
            if dtype == "bfloat16" and not report.half():
                raise Skip("this GPU has no bfloat16")
            _check_that_loss_falls(report, ["SOLVER.AMP.DTYPE", dtype], numbers)


def _check_that_loss_falls(report: Report, keys: list[Any], numbers: dict[str, Any]) -> None:
    keys = ["SOLVER.AMP.ENABLED", True, "SOLVER.WARMUP_ITERS", 5, "SOLVER.BASE_LR", 0.003, *keys]
    losses = first_losses(trainer_of(with_keys(mlp(report), keys), report.folder()), 150)
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    numbers.update(first_loss=round(first, 4), last_loss=round(last, 4))
    assert last < 0.8 * first, f"the loss went from {first} to {last}"


def nonfinite(report: Report) -> None:
    """A step whose loss or gradient is NaN or infinite changes nothing, with fused optimizers."""
    optimizers = {
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    }
    for name, optimizer in optimizers.items():
        for cuda_graph in (False, True):
            with report.attempt(f"NaN is skipped, fused {name}{', CUDA_GRAPH' if cuda_graph else ''}"):
                if cuda_graph:
                    report.needs_cuda("CUDA graphs")
                good = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
                expected = _weights(report, optimizer, good, cuda_graph)
                for bad in (float("nan"), float("inf")):
                    found = _weights(report, optimizer, [*good[:5], bad, good[5]], cuda_graph)
                    torch.testing.assert_close(found, expected)


def _weights(report: Report, optimizer: Any, values: list[float], cuda_graph: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).to(report.device)
    data = [torch.full((2, 3), value, device=report.device) for value in values]
    trainer = SimpleTrainer(
        model, data, optimizer(model.parameters()), nonfinite="skip", device=report.device, cuda_graph=cuda_graph
    )
    trainer.adapter.losses = lambda model, batch: {"loss": model(batch).square().mean()}  # type: ignore[method-assign]
    trainer.train(0, len(values))
    skipped = sum(value - value != 0 for value in values)
    assert trainer.nonfinite.steps == skipped, f"{trainer.nonfinite.steps} steps were skipped, expected {skipped}"
    return model.weight.detach()


def resume(report: Report) -> None:
    """A run with float16, dropout and workers that SIGKILL ends resumes to the same bits."""
    with report.attempt("resume after SIGKILL") as numbers:
        straight, killed = _resumable(report), _resumable(report)
        expected = DefaultTrainer(straight)
        expected.train()
        process = multiprocessing.get_context("spawn").Process(target=_train_and_die, args=(killed,))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"the run to kill ended with {process.exitcode}"
        trainer = DefaultTrainer(killed)
        trainer.resume_or_load(resume=True)
        assert 0 < trainer.start_iter <= KILLED_AT, f"resumed at iteration {trainer.start_iter}"
        trainer.train()
        numbers["resumed_at"] = trainer.start_iter
        for name, value in expected.model.state_dict().items():
            assert torch.equal(trainer.model.state_dict()[name], value), f"{name} differs"
        assert trainer.grad_scaler is not None
        assert expected.grad_scaler is not None
        assert trainer.grad_scaler.state_dict() == expected.grad_scaler.state_dict(), "the scaler's state differs"
        assert _rows(killed) == _rows(straight), "metrics.json differs"


def _resumable(report: Report) -> CfgNode:
    cfg = with_keys(mlp(report), ["SOLVER.AMP.ENABLED", True, "SOLVER.AMP.DTYPE", "float16"])
    cfg.MODEL.ARGS.dropout = 0.2
    cfg.DATALOADER.NUM_WORKERS = 2 if report.cuda else 0
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.CHECKPOINT_PERIOD, cfg.LOG.PERIOD = LENGTH, 5, 7
    cfg.OUTPUT_DIR = report.folder()
    return cfg


def _train_and_die(cfg: CfgNode) -> None:
    def die(trainer: Any) -> None:
        if trainer.iter == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([CallbackHook(before_step=die)])
    trainer.train()


def _rows(cfg: CfgNode) -> list[dict[str, Any]]:
    """The metrics of a run, without timings."""
    rows = map(json.loads, Path(cfg.OUTPUT_DIR, "metrics.json").read_text().splitlines())
    return [{name: value for name, value in row.items() if "time" not in name and "eta" not in name} for row in rows]


def staging(report: Report) -> None:
    """An asynchronous save has the weights of its step, also if the next step changes them at once."""
    with report.attempt("a save is of its step, while later steps run") as numbers:
        size = 100_000_000 if report.cuda else 1000
        model = nn.Linear(size, 1, bias=False, device=report.device)
        numbers["mb"] = 4 * size // 10**6
        checkpointer = Checkpointer(model, report.folder(), asynchronous=True)
        for _ in range(3):  # the first one allocates, later ones use the memory again
            before = model.weight.detach().clone()
            checkpointer.save("state")
            with torch.no_grad():
                model.weight.add_(1.0)
            checkpointer.wait()
            saved = torch.load(Path(checkpointer.save_dir, "state.pth"), weights_only=True)["model"]["weight"]
            assert torch.equal(saved.to(report.device), before), "the file has weights of a later step"
        checkpointer.close()


def float8(report: Report) -> None:
    """The loss falls in float8 (MODEL.FLOAT8), if hardware and torchao have it."""
    for recipe in ("tensorwise", "rowwise"):
        with report.attempt(f"MODEL.FLOAT8 {recipe}: the loss falls") as numbers:
            try:
                check_float8(recipe, torch.device(report.device))
            except ConfigError as error:
                raise Skip(str(error)) from error
            _check_that_loss_falls(report, ["MODEL.FLOAT8", recipe, "MODEL.COMPILE.ENABLED", True], numbers)
