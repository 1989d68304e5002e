"""A step and a save on a GPU, over the loop by hand at its best. ``pytest -m gpu`` checks that results are right."""

import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from checkpoint import save
from measure import Groups, Run, repeated, use_clock
from tasks import default, digits_config, forever
from torch import nn

from hookline.config import CfgNode
from hookline.engine.data import ArrayDataset, build_train_loader
from hookline.engine.modeling import build_model

CUDA = torch.cuda.is_available()  # without a GPU, tiny models try this code on the CPU
DEVICE = "cuda" if CUDA else "cpu"
WIDTH, BATCH, SIDE, CHANNELS = (1024, 256, 32, 128) if CUDA else (8, 4, 4, 4)
# GPT-2 of 124 million parameters.
GPT = {"vocab_size": 50304, "block_size": 1024, "width": 768, "depth": 12, "heads": 12}
if not CUDA:
    GPT = {"vocab_size": 16, "block_size": 8, "width": 8, "depth": 1, "heads": 1}
WAYS: dict[str, list[Any]] = {"default": [], "MODEL.CHANNELS_LAST": ["MODEL.CHANNELS_LAST", True]}
if CUDA:
    WAYS |= {key: [key, True] for key in ("MODEL.COMPILE.ENABLED", "SOLVER.COMPILE_STEP", "SOLVER.CUDA_GRAPH")}


def texts(size: int, length: int, vocab_size: int) -> ArrayDataset:
    """Random tokens (size, length), and the next token at each position."""
    tokens = torch.randint(vocab_size, (size, length + 1), generator=torch.Generator().manual_seed(0))
    return ArrayDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _points(*shape: int) -> dict[str, Any]:
    return {"NAME": "synthetic", "ARGS": {"size": 16 * BATCH, "shape": list(shape), "num_classes": 10}}


_TEXTS = {"size": 256, "length": GPT["block_size"], "vocab_size": GPT["vocab_size"]}
# Arguments of the model, data, size of a batch, and whether in bfloat16.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], int, bool]] = {
    "MLP": ({"in_features": WIDTH, "num_classes": 10, "hidden": [WIDTH, WIDTH]}, _points(WIDTH), BATCH, False),
    "ConvNet": ({"width": CHANNELS, "in_channels": 3}, _points(3, SIDE, SIDE), BATCH, True),
    "GPT": (GPT, {"NAME": f"{__name__}:texts", "ARGS": _TEXTS}, 16 if CUDA else 2, True),
}


def _wait() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def _by_hand(cfg: CfgNode) -> Run:
    """hookline's loader, copies that do not block, autocast, fused AdamW."""
    model, device = build_model(cfg).train(), torch.device(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.SOLVER.BASE_LR, fused=True)
    batches, loss_function = forever(build_train_loader(cfg)), nn.CrossEntropyLoss()

    def step() -> None:
        x, y = (tensor.to(device, non_blocking=True) for tensor in next(batches))
        with torch.autocast(device.type, torch.bfloat16) if cfg.SOLVER.AMP.ENABLED else nullcontext():
            loss = loss_function(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return repeated(step)


def _with(cfg: CfgNode, keys: list[Any]) -> CfgNode:
    cfg = cfg.clone()
    cfg.merge_from_list(keys)
    return cfg


def _step(folder: str, name: str) -> dict[str, Run]:
    use_clock(_wait)
    arguments, data, batch, mixed = MODELS[name]
    cfg = digits_config(folder)
    cfg.merge_from_list(["MODEL.NAME", name, "MODEL.ARGS", arguments, "DATASETS.TRAIN", (data,)])
    cfg.merge_from_list(["MODEL.DEVICE", DEVICE, "MODEL.CHANNELS_LAST", False, "SOLVER.AMP.ENABLED", mixed])
    cfg.DATALOADER.BATCH_SIZE, cfg.SOLVER.CHECKPOINT_PERIOD = batch, 0
    ways = {way: keys for way, keys in WAYS.items() if name == "ConvNet" or "CHANNELS" not in way}
    return {"by hand": _by_hand(cfg), **{way: default(_with(cfg, keys)) for way, keys in ways.items()}}


GROUPS: Groups = {name: (100, partial(_step, name=name)) for name in MODELS}
GROUPS["save"] = (1, partial(save, size=83_000_000 if CUDA else 2000, device=DEVICE))
