"""A step with a loader of the user's own, into which the engine cannot see."""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..config import CfgNode
from ..engine import DefaultTrainer, SimpleTrainer
from ..engine.data import build_train_loader
from ..engine.modeling import ModelAdapter
from .measure import interleaved, ratios, timed, usual_logging
from .work import by_hand, tiny_config


class Generated:
    """Batches from a generator, endlessly."""

    def __init__(self, data: TensorDataset, batch_size: int) -> None:
        self._data, self._batch_size = data, batch_size

    def __iter__(self) -> Iterator[Any]:
        while True:
            for part in torch.randperm(len(self._data)).split(self._batch_size):
                yield self._data[part]


def _batches(data: TensorDataset, batch_size: int) -> list[Any]:
    return list(DataLoader(data, batch_size=batch_size))


def _without_sampler(data: TensorDataset, batch_size: int) -> DataLoader[Any]:
    return DataLoader(_batches(data, batch_size), batch_size=None, shuffle=True)  # type: ignore[arg-type]


LOADERS: dict[str, Callable[[TensorDataset, int], Any]] = {
    "generator": Generated,
    "list of batches": _batches,
    "DataLoader without batches": _without_sampler,
}


def loaders(args: argparse.Namespace) -> dict[str, Any]:
    """Time per step relative to a hand-written loop over the same loader, on a tiny model."""
    results: dict[str, Any] = {}
    for name, make in LOADERS.items():
        with tempfile.TemporaryDirectory() as folder, usual_logging():
            cfg = tiny_config(folder)
            data: Any = build_train_loader(cfg).dataset
            pairs = TensorDataset(*data.tensors)

            def build(cfg: CfgNode, make: Any = make, pairs: Any = pairs) -> Any:
                return make(pairs, cfg.DATALOADER.BATCH_SIZE)

            own = type("Own", (DefaultTrainer,), {"build_train_loader": staticmethod(build)})
            parts, adapter = own(cfg), ModelAdapter(nn.CrossEntropyLoss())
            runs = {
                "by hand": by_hand(cfg, torch.optim.SGD, build(cfg)),
                "lean": timed(SimpleTrainer(parts.model, build(cfg), parts.optimizer, adapter=adapter)),
                "default": timed(own(cfg)),
            }
            results[name] = ratios(interleaved(runs, args.steps or 5000, args.rounds), "by hand")
    return results
