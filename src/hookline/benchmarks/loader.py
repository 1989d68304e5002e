"""Speed of the loader of a config, relative to a plain DataLoader."""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ..config import CfgNode, get_cfg
from ..engine.data import build_train_loader
from ..engine.data.epoch_iterator import EpochIterator
from .measure import Run, interleaved, now
from .work import forever

SIZE, SHAPE, BATCH_SIZE = 4096, (1, 8, 8), 64


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Returns single samples, as a data set of files does."""

    def __init__(self) -> None:
        self._x, self._y = torch.randn(SIZE, *SHAPE), torch.zeros(SIZE, dtype=torch.int64)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[index], self._y[index]

    def __len__(self) -> int:
        return SIZE


class PureSamples(Samples):
    """The same, declared to draw no random numbers, so that samples are not seeded."""

    deterministic = True


class RandomSamples(Samples):
    """Samples with noise, a random flip and a random shift, as augmentation draws them from torch's generator."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        if torch.rand(()) < 0.5:
            x = x.flip(-1)
        return x.roll(int(torch.randint(3, ())), -1) + 0.1 * torch.randn(SHAPE), y


def loader(args: argparse.Namespace) -> dict[str, Any]:
    """Batches per second: 64 samples of (1, 8, 8), with 0 and 2 persistent workers."""
    entries: dict[str, Any] = {
        "arrays": {"NAME": "synthetic", "ARGS": {"size": SIZE, "shape": list(SHAPE)}},
        "samples": {"NAME": f"{__name__}:Samples", "ARGS": {}},
        "samples with random draws": {"NAME": f"{__name__}:RandomSamples", "ARGS": {}},
        "deterministic samples": {"NAME": f"{__name__}:PureSamples", "ARGS": {}},
    }
    results: dict[str, Any] = {}
    for name, entry in entries.items():
        for workers in (0, 2):
            built = build_train_loader(_config(entry, workers))
            data: Any = built.dataset
            plain = DataLoader(
                TensorDataset(*data.tensors) if name == "arrays" else data,
                batch_size=BATCH_SIZE,
                shuffle=True,
                num_workers=workers,
                persistent_workers=workers > 0,
            )
            runs = {"plain": _read(forever(plain)), "hookline": _read(EpochIterator(built))}
            seconds = interleaved(runs, args.steps or (640 if workers == 0 else 320), args.rounds)
            results[f"{name}, {workers} workers"] = {
                **{f"{key}_per_s": round(1 / value) for key, value in seconds.items()},
                "time_ratio": round(seconds["hookline"] / seconds["plain"], 3),
            }
    return results


def _config(entry: dict[str, Any], workers: int) -> CfgNode:
    cfg = get_cfg()
    cfg.DATASETS.TRAIN = (entry,)
    cfg.DATALOADER.BATCH_SIZE = BATCH_SIZE
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.MODEL.DEVICE = "cpu"
    cfg.SEED = 0
    return cfg


def _read(batches: Iterator[Any]) -> Run:
    def run(steps: int) -> float:
        start = now()
        for _ in range(steps):
            next(batches)
        return now() - start

    return run
