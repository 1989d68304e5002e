"""The training tasks, by hand and with hookline: a step with almost no work, and a small real one."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from measure import Run, now, repeated
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hookline.config import CfgNode, get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer, comm, setup_logger
from hookline.engine.data import build_train_loader
from hookline.engine.modeling import ModelAdapter, build_model
from hookline.hooks import CallbackHook

WARM_UP = 20  # steps at the start of a run that are not measured


def tiny_config(folder: str) -> CfgNode:
    """Linear(8, 8), batches of 4 random samples, SGD: nearly all of a step is overhead. Saves every 5,000 steps."""
    cfg = get_cfg()
    cfg.MODEL.NAME, cfg.MODEL.ARGS = "torch.nn:Linear", CfgNode({"in_features": 8, "out_features": 8})
    cfg.MODEL.LOSS.NAME = "CrossEntropyLoss"
    cfg.DATASETS.TRAIN = ({"NAME": "synthetic", "ARGS": {"size": 4096, "shape": [8], "num_classes": 8}},)
    cfg.DATALOADER.BATCH_SIZE = 4
    cfg.SOLVER.OPTIMIZER.NAME, cfg.SOLVER.BASE_LR = "SGD", 0.01
    cfg.SOLVER.MOMENTUM = cfg.SOLVER.WEIGHT_DECAY = 0.0
    cfg.SOLVER.CHECKPOINT_PERIOD = 5000
    return _common(cfg, folder)


def digits_config(folder: str) -> CfgNode:
    """The digits ConvNet, batches of 64, AdamW. Saves every 5 epochs, and does not evaluate."""
    cfg = get_cfg()
    cfg.merge_from_file("digits/convnet.yaml")
    cfg.DATASETS.TEST, cfg.CHECKPOINT.BEST.METRIC = (), ""
    return _common(cfg, folder)


def _common(cfg: CfgNode, folder: str) -> CfgNode:
    cfg.MODEL.DEVICE, cfg.SEED, cfg.SOLVER.MAX_ITER, cfg.OUTPUT_DIR = "cpu", 0, 1_000_000, folder
    return cfg


Parts = tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]


def plain_parts(cfg: CfgNode, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Parts:
    """Build model, loader and optimizer of a config by hand. ``wrap`` wraps the model for several ranks."""
    torch.manual_seed(0)
    cfg = cfg.clone()
    cfg.merge_from_list(["MODEL.CHANNELS_LAST", False])
    model = wrap(build_model(cfg)).train()
    data, ranks = TensorDataset(*build_train_loader(cfg).dataset.tensors), comm.get_world_size()
    sampler = DistributedSampler(data) if ranks > 1 else None
    loader = DataLoader(data, cfg.DATALOADER.BATCH_SIZE // ranks, shuffle=sampler is None, sampler=sampler)
    optimizer = getattr(torch.optim, cfg.SOLVER.OPTIMIZER.NAME)(model.parameters(), lr=cfg.SOLVER.BASE_LR)
    return model, loader, optimizer


def forever(loader: Any) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def by_hand(parts: Parts, device: str = "cpu") -> Run:
    """The usual hand-written loop: a shuffling DataLoader, forward, loss, zero_grad, backward, step."""
    model, loader, optimizer = parts
    batches, loss_function = forever(loader), nn.CrossEntropyLoss()

    def step() -> None:
        x, y = (tensor.to(device) for tensor in next(batches)) if device != "cpu" else next(batches)
        with torch.autocast(device, torch.bfloat16) if device != "cpu" else nullcontext():
            loss = loss_function(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return repeated(step)


def lean(cfg: CfgNode, **arguments: Any) -> Run:
    """SimpleTrainer with the model, data and optimizer of the config, without hooks except the clock."""
    parts = DefaultTrainer(cfg)
    arguments = {"adapter": ModelAdapter(nn.CrossEntropyLoss()), "strategy": parts.strategy, **arguments}
    return timed(SimpleTrainer(parts.model, parts.data_loader, parts.optimizer, **arguments))


def default(cfg: CfgNode) -> Run:
    """DefaultTrainer with its defaults, and the logging of a run."""
    setup_logger(distributed_rank=comm.get_rank())
    return timed(DefaultTrainer(cfg))


class Span:
    """Measures the time from the end of step ``WARM_UP`` to the end of the step ``steps`` later."""

    def __init__(self, steps: int) -> None:
        self._done, self._last = 0, WARM_UP + steps
        self.total = self._last + 1  # one more, so that the work after the last measured step counts
        self.seconds = 0.0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """To be called at the end of each step."""
        self._done += 1
        if self._done == WARM_UP + 1:
            self._start = now()
        elif self._done == self._last + 1:
            self.seconds = now() - self._start


def timed(trainer: SimpleTrainer) -> Run:
    """Time the steps of a trainer, without the start and end of its training."""

    def run(steps: int) -> float:
        span = Span(steps)
        clock = CallbackHook(before_step=span.step)
        trainer.register_hooks([clock])
        SimpleTrainer.train(trainer, 0, span.total + 1)
        trainer.remove_hook(clock)
        return span.seconds

    return run
