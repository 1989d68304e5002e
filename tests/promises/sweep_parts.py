"""The run of both sweeps, and its parts: data that draw random numbers, and a hook that writes images and numbers."""

import random
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from hookline.hooks import HookBase

CONFIG = {
    "_BASE_": str(Path(__file__).parents[2] / "configs/synthetic/mlp.yaml"),
    "MODEL": {"ARGS": {"hidden": [8], "dropout": 0.2}},
    "DATASETS": {"TRAIN": ["sweep_parts:Samples"], "TEST": [{"NAME": "synthetic", "ARGS": {"size": 32, "seed": 1}}]},
    "DATALOADER": {"BATCH_SIZE": 8},
    "SOLVER": {"MAX_ITER": 12, "CHECKPOINT_PERIOD": 3, "WARMUP_ITERS": 2},
    "TEST": {"EVAL_PERIOD": 4},
    "CHECKPOINT": {"MAX_TO_KEEP": 2, "BEST": {"METRIC": "synthetic/loss", "MODE": "min", "KEEP": 2}},
    "HOOKS": [{"NAME": "EMA", "ARGS": {"decay": 0.9}}, "sweep_parts:Pictures"],
    "LOG": {"PERIOD": 2, "WRITERS": ["JSONWriter", "CSVWriter", "TensorboardXWriter"]},
    "SEED": 3,
}


class Samples(Dataset):
    """Different numbers at each read, from Python's, NumPy's and torch's generators."""

    def __init__(self, size: int = 64) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.full((8,), float(index % 4)) + torch.randn(8)
        return x * random.uniform(0.5, 1.5) + float(np.random.uniform(-1, 1)), index % 4


class Pictures(HookBase):
    """Puts an image every third iteration and a random number every second."""

    def after_step(self) -> None:
        storage = self.trainer.storage
        if self.trainer.iter % 3 == 1:
            storage.put_image("picture", torch.full((3, 4, 4), self.trainer.iter, dtype=torch.uint8))
            storage.put_histogram("weights", next(self.trainer.model.parameters()))
        if self.trainer.iter % 2:
            storage.put_scalar("drawn", float(torch.rand(())), smoothing_hint=False)
