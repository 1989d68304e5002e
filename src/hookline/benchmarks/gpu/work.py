"""Models and data of ``hookline benchmark gpu``: what fills a GPU, or on the CPU as little as possible."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ...config import CfgNode, get_cfg
from ...engine import DefaultTrainer, SimpleTrainer
from ...engine.data import ArrayDataset, build_train_loader
from ...engine.modeling import build_model
from ...hooks import CallbackHook, PeriodicCheckpointer
from ..measure import Run, StepClock, now
from ..work import forever
from .report import Report

__all__ = [
    "by_hand",
    "convnet",
    "first_losses",
    "gpt",
    "mlp",
    "plain",
    "token_texts",
    "train_without_waiting",
    "trainer_of",
    "with_keys",
]


def token_texts(size: int, length: int, vocab_size: int) -> ArrayDataset:
    """Random tokens (size, length), and the next token at each position."""
    tokens = torch.randint(vocab_size, (size, length + 1), generator=torch.Generator().manual_seed(0))
    return ArrayDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def mlp(report: Report) -> CfgNode:
    """Three layers, float32: the GPU waits for the host, unless a step is one graph."""
    width, batch = (1024, 256) if report.cuda else (8, 4)
    model = {"in_features": width, "num_classes": 10, "hidden": [width, width]}
    return _config(report, "MLP", model, _points(batch, [width]), batch)


def convnet(report: Report) -> CfgNode:
    """Convolutions and batch norm on images of 32x32, in mixed precision."""
    width, batch, side = (128, 256, 32) if report.cuda else (4, 4, 4)
    cfg = _config(report, "ConvNet", {"width": width, "in_channels": 3}, _points(batch, [3, side, side]), batch)
    return _mixed(cfg, report)


def gpt(report: Report) -> CfgNode:
    """GPT-2 of 124 million parameters on texts of 1,024 tokens in mixed precision; smaller on a small GPU."""
    width, depth, length, vocab_size, batch = 8, 1, 8, 16, 2
    if report.cuda:
        memory = torch.cuda.get_device_properties(0).total_memory
        width, depth, length, vocab_size = (768, 12, 1024, 50304) if memory > 20e9 else (384, 6, 512, 16384)
        batch = 16 if memory > 70e9 else 4
    sizes = {"block_size": length, "width": width, "depth": depth, "heads": max(width // 64, 1)}
    model = {"vocab_size": vocab_size, **sizes}
    texts = {"size": 16 * batch, "length": length, "vocab_size": vocab_size}
    data = {"NAME": f"{__name__}:token_texts", "ARGS": texts}
    return _mixed(_config(report, "GPT", model, data, batch), report)


def _points(batch: int, shape: list[int]) -> dict[str, Any]:
    return {"NAME": "synthetic", "ARGS": {"size": 16 * batch, "shape": shape, "num_classes": 10}}


def _config(report: Report, name: str, model: dict[str, Any], data: dict[str, Any], batch: int) -> CfgNode:
    cfg = get_cfg()
    cfg.MODEL.NAME, cfg.MODEL.ARGS, cfg.MODEL.DEVICE = name, CfgNode(model), report.device
    cfg.MODEL.LOSS.NAME = "CrossEntropyLoss"
    cfg.DATASETS.TRAIN = (data,)
    cfg.DATALOADER.BATCH_SIZE = batch
    cfg.SOLVER.OPTIMIZER.NAME = "AdamW"
    cfg.SOLVER.MAX_ITER = 1_000_000
    cfg.LOG.CURVES = cfg.LOG.PROGRESS_BAR = False
    cfg.SEED = 0
    return cfg


def _mixed(cfg: CfgNode, report: Report) -> CfgNode:
    return with_keys(cfg, ["SOLVER.AMP.ENABLED", True]) if report.half() else cfg


def with_keys(cfg: CfgNode, keys: Sequence[Any]) -> CfgNode:
    """A copy of a config with other values: keys and values in turn."""
    cfg = cfg.clone()
    cfg.merge_from_list(list(keys))
    return cfg


def by_hand(cfg: CfgNode) -> Run:
    """The loop by hand, at its best: hookline's loader, copies that do not block, autocast, fused AdamW."""
    torch.manual_seed(0)
    model, device = build_model(cfg).train(), torch.device(cfg.MODEL.DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.SOLVER.BASE_LR, fused=True)
    batches, loss_function = forever(build_train_loader(cfg)), nn.CrossEntropyLoss()
    mixed = cfg.SOLVER.AMP.ENABLED

    def train(steps: int) -> None:
        for _ in range(steps):
            x, y = (tensor.to(device, non_blocking=True) for tensor in next(batches))
            with torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext():
                loss = loss_function(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def run(steps: int) -> float:
        train(StepClock.WARM_UP)
        start = now()
        train(steps)
        return now() - start

    return run


def plain(cfg: CfgNode, folder: str) -> tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]:
    """The parts of a loop by hand for other trainers, on the device of ``cfg``."""
    torch.manual_seed(0)
    model, data = build_model(cfg), token_texts(**cfg.DATASETS.TRAIN[0]["ARGS"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.SOLVER.BASE_LR, fused=True)
    pin = cfg.MODEL.DEVICE == "cuda"
    return model, DataLoader(TensorDataset(*data.tensors), cfg.DATALOADER.BATCH_SIZE, True, pin_memory=pin), optimizer


def trainer_of(cfg: CfgNode, folder: str) -> DefaultTrainer:
    """A run with its default hooks, except that it saves no checkpoints."""
    trainer = DefaultTrainer(with_keys(cfg, ["OUTPUT_DIR", folder]))
    trainer.remove_hook(PeriodicCheckpointer)
    return trainer


def first_losses(trainer: SimpleTrainer, steps: int) -> list[float]:
    """Train so many steps, and return their losses."""
    SimpleTrainer.train(trainer, 0, steps)
    return [value for value, _ in trainer.storage.history("total_loss").values()]


def train_without_waiting(trainer: DefaultTrainer, first: int, last: int) -> None:
    """Train; an error is raised if one of the steps from ``first`` to ``last`` waits for the GPU."""

    def watch(trainer: Any) -> None:
        if trainer.iter == first:
            torch.cuda.set_sync_debug_mode("error")
        if trainer.iter == last + 1:
            torch.cuda.set_sync_debug_mode("default")

    trainer.register_hooks([CallbackHook(before_step=watch)])
    try:
        assert trainer.train().reason == "completed"
    finally:
        torch.cuda.set_sync_debug_mode("default")
