"""A pass over a test set, over a loop by hand that counts the same accuracy."""

from functools import partial

import torch
from measure import Groups, Run, repeated
from tasks import digits_config, tiny_config
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookline.config import name_of
from hookline.engine import DefaultTrainer
from hookline.engine.data import build_test_loader

BATCH_SIZE = 64


@torch.no_grad()
def _accuracy(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    hits = samples = 0
    for x, y in loader:
        hits += int((model(x).argmax(1) == y).sum())
        samples += len(y)
    model.train()
    return hits / samples


def _runs(folder: str, name: str) -> dict[str, Run]:
    cfg = tiny_config(folder) if name == "tiny" else digits_config(folder)
    cfg.DATASETS.TEST = cfg.DATASETS.TRAIN if name == "tiny" else ("digits_test",)
    cfg.DATALOADER.BATCH_SIZE, cfg.TEST.METRICS, cfg.MODEL.CHANNELS_LAST = BATCH_SIZE, ("Accuracy",), False
    trainer = DefaultTrainer(cfg)
    data = build_test_loader(cfg, name_of(cfg.DATASETS.TEST[0])).dataset
    loader = DataLoader(TensorDataset(*data.tensors), BATCH_SIZE)
    by_hand = repeated(lambda: _accuracy(trainer.model, loader))
    return {"by hand": by_hand, "hookline": repeated(trainer.evaluate)}


GROUPS: Groups = {name: (10, partial(_runs, name=name)) for name in ("tiny", "digits")}
