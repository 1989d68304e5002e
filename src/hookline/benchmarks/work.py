"""The training tasks, by hand and by hookline: a step with almost no work, and a small real one."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..config import CfgNode, get_cfg
from ..engine import DefaultTrainer, SimpleTrainer
from ..engine.data import build_train_loader
from ..engine.modeling import ModelAdapter, build_model
from .measure import Run, now, timed

DIGITS = "digits/convnet.yaml"
LOG_PERIOD = 20


def tiny_config(folder: str) -> CfgNode:
    """Linear(8, 8), batches of 4 random samples, SGD: measures everything around the model."""
    cfg = get_cfg()
    cfg.MODEL.NAME = "torch.nn:Linear"
    cfg.MODEL.ARGS = CfgNode({"in_features": 8, "out_features": 8})
    cfg.MODEL.LOSS.NAME = "CrossEntropyLoss"
    cfg.DATASETS.TRAIN = ({"NAME": "synthetic", "ARGS": {"size": 4096, "shape": [8], "num_classes": 8}},)
    cfg.DATALOADER.BATCH_SIZE = 4
    cfg.SOLVER.MOMENTUM = 0.0
    cfg.SOLVER.WEIGHT_DECAY = 0.0
    cfg.SOLVER.BASE_LR = 0.01
    cfg.SOLVER.CHECKPOINT_PERIOD = 5000
    return _common(cfg, folder)


def digits_config(folder: str) -> CfgNode:
    """The digits ConvNet, batches of 64, AdamW; a checkpoint every 5 epochs, and no evaluation."""
    cfg = get_cfg()
    cfg.merge_from_file(DIGITS)
    cfg.DATASETS.TEST = ()
    cfg.CHECKPOINT.BEST.METRIC = ""
    return _common(cfg, folder)


def _common(cfg: CfgNode, folder: str) -> CfgNode:
    cfg.MODEL.DEVICE = "cpu"
    cfg.SEED = 0
    cfg.SOLVER.MAX_ITER = 1_000_000
    cfg.OUTPUT_DIR = folder
    return cfg


def plain_parts(cfg: CfgNode, optimizer: type[torch.optim.Optimizer]) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Build model, loader and optimizer by hand, from a config's model and data."""
    torch.manual_seed(0)
    plain = cfg.clone()
    plain.defrost()
    plain.MODEL.CHANNELS_LAST = False
    model = build_model(plain)
    dataset: Any = build_train_loader(cfg).dataset
    loader = DataLoader(TensorDataset(*dataset.tensors), batch_size=cfg.DATALOADER.BATCH_SIZE, shuffle=True)
    return model, loader, optimizer(model.parameters(), lr=cfg.SOLVER.BASE_LR)  # type: ignore[call-arg]


def forever(loader: Any) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def by_hand(cfg: CfgNode, optimizer: type[torch.optim.Optimizer], loader: Any = None) -> Run:
    """The usual hand-written loop: a shuffling DataLoader or another ``loader``, zero_grad, backward, step."""
    model, usual, opt = plain_parts(cfg, optimizer)
    batches = forever(loader or usual)
    loss_function = nn.CrossEntropyLoss()

    def run(steps: int) -> float:
        model.train()
        start = now()
        for _ in range(steps):
            x, y = next(batches)
            loss = loss_function(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        return now() - start

    return run


def by_hand_with_logging(cfg: CfgNode, optimizer: type[torch.optim.Optimizer], folder: str, console: TextIO) -> Run:
    """The same loop, with console, JSON lines and TensorBoard every 20 steps; no schedule, no checkpoints."""
    from torch.utils.tensorboard import SummaryWriter

    model, loader, opt = plain_parts(cfg, optimizer)
    batches = forever(loader)
    loss_function = nn.CrossEntropyLoss()
    logger = logging.Logger("by hand")
    handler = logging.StreamHandler(console)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    rows = open(Path(folder) / "by_hand.json", "a", encoding="utf-8")  # noqa: SIM115 (as long as the process)
    board = SummaryWriter(str(Path(folder) / "by_hand"))

    def run(steps: int) -> float:
        model.train()
        start = last = now()
        for step in range(steps):
            x, y = next(batches)
            loss = loss_function(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if (step + 1) % LOG_PERIOD == 0:
                moment = now()
                row = {"loss": loss.item(), "lr": opt.param_groups[0]["lr"], "time": (moment - last) / LOG_PERIOD}
                last = moment
                logger.info("iter: %d  loss: %.4g  lr: %.5g  time: %.3g", step, row["loss"], row["lr"], row["time"])
                rows.write(json.dumps({"iteration": step, **row}) + "\n")
                rows.flush()
                for name, value in row.items():
                    board.add_scalar(name, value, step)
        return now() - start

    return run


def lean(cfg: CfgNode) -> Run:
    """SimpleTrainer with the model, data and optimizer of the config, without hooks except the clock."""
    parts = DefaultTrainer(cfg)
    adapter = ModelAdapter(nn.CrossEntropyLoss())
    return timed(SimpleTrainer(parts.model, parts.data_loader, parts.optimizer, adapter=adapter))


def compiled(cfg: CfgNode, backend: str, steps: int | None = None) -> Run:
    """The lean set-up with SOLVER.COMPILE_STEP. Graphs are compiled before this returns.

    Args:
        cfg: the config.
        backend: torch.compile's.
        steps: how many steps one call runs.

    Raises:
        ConfigError: the step cannot be compiled here, for example without a C++ compiler.
    """
    parts = DefaultTrainer(cfg)
    adapter = ModelAdapter(nn.CrossEntropyLoss())
    args = {"backend": backend} if steps is None else {"backend": backend, "steps": steps}
    trainer = SimpleTrainer(parts.model, parts.data_loader, parts.optimizer, adapter=adapter, compile_step=args)
    run = timed(trainer)
    run(parts.iters_per_epoch or 1)  # all shapes of batches
    return run


def default(cfg: CfgNode) -> Run:
    """DefaultTrainer with its defaults; the caller sets up logging (``usual_logging``)."""
    return timed(DefaultTrainer(cfg))
