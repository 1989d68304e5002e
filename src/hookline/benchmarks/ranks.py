"""A step on two ranks, relative to a loop by hand with the same model, data and strategy."""

import argparse
import gc
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ..config import CfgNode
from ..engine import DefaultTrainer, SimpleTrainer, comm, launch
from ..engine.data import ArrayDataset, build_train_loader
from ..engine.modeling import ModelAdapter, build_model
from ..hooks import HookBase
from .measure import now, use_clock, usual_logging
from .work import digits_config

RANKS = 2
# Options, and steps per slice: a multiple of LOG.PERIOD, so that every slice writes metrics equally often.
MODELS: dict[str, tuple[list[Any], int]] = {
    "MLP": (["MODEL.NAME", "MLP", "MODEL.ARGS", {"in_features": 64, "num_classes": 10, "hidden": [256, 256]}], 200),
    "ConvNet": ([], 40),
    "GPT": (
        [
            *("MODEL.NAME", "GPT", "MODEL.ARGS", {"block_size": 64, "width": 128, "depth": 2, "heads": 4}),
            *("DATASETS.TRAIN", ({"NAME": "hookline.benchmarks.ranks:tokens"},), "DATALOADER.BATCH_SIZE", 16),
        ],
        40,
    ),
}
_UNITS = {"GPT": {"modules": ["TransformerBlock"]}}  # FSDP2's; the others are one unit
_COUNTED = 30  # steps of which collectives and calls are counted

Step = Callable[[], None]


def tokens(size: int = 1024, length: int = 64, vocabulary: int = 256) -> ArrayDataset:
    """Return sequences of random tokens, whose targets are the next tokens."""
    drawn = torch.randint(vocabulary, (size, length + 1), generator=torch.Generator().manual_seed(0))
    return ArrayDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


def ranks(args: argparse.Namespace) -> dict[str, Any]:
    """Time per step with DDP and FSDP2, on two processes of one thread each; collectives and Python calls per step."""
    results: dict[str, Any] = launch(_measure, RANKS, args=(args.steps, args.rounds, args.clock), device="cpu")
    return results


def _measure(steps: int, rounds: int, clock: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    use_clock(clock)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as own, usual_logging():
        folder = comm.broadcast_object(own)
        for strategy in ("ddp", "fsdp2"):
            for name, (options, slice_steps) in MODELS.items():
                cfg = digits_config(f"{folder}/{strategy}-{name}")
                cfg.merge_from_list(["PARALLEL.NAME", strategy, "MODEL.CHANNELS_LAST", False, *options])
                if strategy == "fsdp2":
                    cfg.PARALLEL.ARGS = CfgNode(_UNITS.get(name, {}))
                results[f"{strategy}, {name}"] = _compare(cfg, steps or slice_steps, rounds)
        comm.synchronize()  # rank 0 removes the folder
    return results


def _compare(cfg: CfgNode, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    default, parts = DefaultTrainer(cfg), DefaultTrainer(cfg)
    adapter = ModelAdapter(nn.CrossEntropyLoss())
    lean = SimpleTrainer(parts.model, parts.data_loader, parts.optimizer, adapter=adapter, strategy=parts.strategy)
    step = _by_hand(cfg, default.model)
    seconds: list[float] = []
    counter = _Counter()
    for _ in range(_COUNTED):
        counter.mark()
        step()
    results = {"by hand": counter.medians()}
    for name, trainer in {"lean": lean, "default": default}.items():
        slices = _Slices(step, steps)
        counter = _Counter()
        trainer.register_hooks([slices, _Counting(counter)])
        SimpleTrainer.train(trainer, 0, steps * (rounds + 1) + _COUNTED)
        seconds += slices.by_hand
        ratio = statistics.median(ours / theirs for ours, theirs in zip(slices.ours, slices.by_hand, strict=True))
        results[name] = {"us_per_step": _us(slices.ours), "ratio": round(ratio, 3), **counter.medians()}
    results["by hand"] = {"us_per_step": _us(seconds), "ratio": 1.0, **results["by hand"]}
    return results


def _us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


def _by_hand(cfg: CfgNode, ours: nn.Module) -> Step:
    """Return a step of the usual loop: a DataLoader with a DistributedSampler, zero_grad, backward, step.

    Args:
        cfg: the config.
        ours: the wrapped model of a trainer. The model by hand is wrapped likewise.
    """
    torch.manual_seed(0)
    model = build_model(cfg)
    if isinstance(ours, DistributedDataParallel):
        model = DistributedDataParallel(model)
    else:
        for name in [name for name, module in ours.named_modules() if isinstance(module, FSDPModule)][::-1]:
            fully_shard(model.get_submodule(name))
    dataset: Any = build_train_loader(cfg).dataset
    pairs = TensorDataset(*dataset.tensors)
    sampler: DistributedSampler[Any] = DistributedSampler(pairs)
    batches = _epochs(DataLoader(pairs, batch_size=cfg.DATALOADER.BATCH_SIZE // RANKS, sampler=sampler), sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.SOLVER.BASE_LR)
    loss_function = nn.CrossEntropyLoss()
    model.train()

    def step() -> None:
        x, y = next(batches)
        loss = loss_function(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _epochs(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Iterator[Any]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


class _Slices(HookBase):
    """Runs a slice of steps by hand after each slice of the trainer's steps, and measures both."""

    def __init__(self, step: Step, steps: int) -> None:
        self._step, self._steps = step, steps
        self.ours: list[float] = []
        self.by_hand: list[float] = []
        self._start = 0.0

    def before_step(self) -> None:
        iteration, steps = self.trainer.iter, self._steps
        if iteration % steps or iteration > self.trainer.max_iter - _COUNTED:
            return
        if iteration > steps:  # not the first slice, in which caches fill
            self.ours.append((now() - self._start) / steps)
        gc.collect()
        comm.synchronize()
        start = now()
        for _ in range(steps):
            self._step()
        if iteration > steps:
            self.by_hand.append((now() - start) / steps)
        gc.collect()
        comm.synchronize()
        self._start = now()


class _Counter:
    """Counts collectives and Python calls of steps. Each step begins with :meth:`mark`."""

    def __init__(self) -> None:
        self._calls = 0
        self._marks: list[tuple[int, int]] = []

    def mark(self) -> None:
        groups: set[Any] = {dist.group.WORLD, comm.object_group()}
        self._marks.append((sum(group._get_sequence_number_for_group() for group in groups), self._calls))
        if len(self._marks) == 1:
            sys.setprofile(self._count)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self._calls += event in ("call", "c_call")

    def medians(self) -> dict[str, float]:
        """Return the medians of the steps, and stop to count."""
        sys.setprofile(None)
        steps = [[then - first for first, then in zip(*pair, strict=True)] for pair in pairwise(self._marks)]
        collectives, calls = (statistics.median(counts) for counts in zip(*steps, strict=True))
        return {"collectives": collectives, "calls": calls}


class _Counting(HookBase):
    """Counts in the last steps of a run."""

    def __init__(self, counter: _Counter) -> None:
        self._counter = counter

    def before_step(self) -> None:
        if self.trainer.iter >= self.trainer.max_iter - _COUNTED:
            self._counter.mark()
