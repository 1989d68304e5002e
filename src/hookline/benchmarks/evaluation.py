"""Evaluation, and prediction to disk, relative to loops by hand with the same metric and file."""

import argparse
import csv
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..config import CfgNode
from ..engine import DefaultTrainer
from ..engine.data import build_test_loader
from ..engine.program.look import predict
from .measure import interleaved, ratios, repeated, usual_logging
from .work import digits_config, tiny_config

BATCH_SIZE = 64
# Passes over the test set per round. Tiny has 4,096 samples, the digits 355.
WORKS: dict[str, tuple[Callable[[str], CfgNode], int]] = {"tiny": (tiny_config, 5), "digits": (digits_config, 10)}


def evaluation(args: argparse.Namespace) -> dict[str, Any]:
    """Time of a pass over a test set: accuracy, and predictions to a file of each format."""
    results: dict[str, Any] = {}
    for name, (config, passes) in WORKS.items():
        with tempfile.TemporaryDirectory() as folder, usual_logging():
            cfg = config(folder)
            cfg.DATASETS.TEST = ("digits_test",) if name == "digits" else cfg.DATASETS.TRAIN
            cfg.DATALOADER.BATCH_SIZE = BATCH_SIZE
            cfg.TEST.METRICS = ("Accuracy",)
            cfg.MODEL.CHANNELS_LAST = False
            trainer = DefaultTrainer(cfg)
            loader = _plain_loader(cfg)
            acts: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
            acts["accuracy"] = _accuracy(trainer.model, loader), trainer.evaluate
            for form, write in _FORMS.items():
                path = Path(folder, f"by_hand.{form}")
                acts[f"predictions, {form}"] = (_predictions(trainer.model, loader, write, path), _ours(trainer, form))
            for what, (by_hand, ours) in acts.items():
                runs = {"by hand": repeated(by_hand), "hookline": repeated(ours)}
                rows = ratios(interleaved(runs, args.steps or passes, args.rounds), "by hand")
                results[f"{name}, {what}"] = {
                    "ms_by_hand": round(rows["by hand"]["us_per_step"] / 1000, 2),
                    "ms_hookline": round(rows["hookline"]["us_per_step"] / 1000, 2),
                    "ratio": rows["hookline"]["ratio"],
                }
    return results


def _plain_loader(cfg: CfgNode) -> DataLoader[Any]:
    name = cfg.DATASETS.TEST[0]
    data: Any = build_test_loader(cfg, name if isinstance(name, str) else name["NAME"]).dataset
    return DataLoader(TensorDataset(*data.tensors), batch_size=BATCH_SIZE)


def _accuracy(model: nn.Module, loader: DataLoader[Any]) -> Callable[[], float]:
    def run() -> float:
        model.eval()
        hits = samples = 0
        with torch.no_grad():
            for x, y in loader:
                hits += int((model(x).argmax(1) == y).sum())
                samples += len(y)
        model.train()
        return hits / samples

    return run


def _ours(trainer: DefaultTrainer, form: str) -> Callable[[], Any]:
    cfg = trainer.cfg

    def run() -> None:
        cfg.defrost()
        cfg.TEST.PREDICTIONS_FORMAT = form
        cfg.freeze()
        predict(trainer)

    return run


Write = Callable[[Iterator[torch.Tensor], Path], None]


def _predictions(model: nn.Module, loader: DataLoader[Any], write: Write, path: Path) -> Callable[[], None]:
    def outputs() -> Iterator[torch.Tensor]:
        model.eval()
        with torch.no_grad():
            for x, _ in loader:
                yield model(x)
        model.train()

    return lambda: write(outputs(), path)


def _write_lines(outputs: Iterator[torch.Tensor], path: Path) -> None:
    index = 0
    with path.open("w") as file:
        for batch in outputs:
            for row in batch.tolist():
                file.write(json.dumps({"index": index, "prediction": row}) + "\n")
                index += 1


def _write_table(outputs: Iterator[torch.Tensor], path: Path) -> None:
    index = 0
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        for batch in outputs:
            if index == 0:
                writer.writerow(["index", *(f"prediction_{column}" for column in range(batch.shape[1]))])
            for row in batch.tolist():
                writer.writerow([index, *row])
                index += 1


def _write_arrays(outputs: Iterator[torch.Tensor], path: Path) -> None:
    np.savez(path, prediction=torch.cat(list(outputs)).numpy())


_FORMS: dict[str, Write] = {"jsonl": _write_lines, "csv": _write_table, "npz": _write_arrays}
