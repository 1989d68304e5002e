"""Digits with random shifts, brightness and noise, drawn from Python's, NumPy's and torch's generators."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset

from hookline.engine.data.datasets import digits_train


class AugmentedDigits(Dataset):
    """Sample ``i`` is a different image at each read."""

    def __init__(self) -> None:
        self.digits = digits_train()

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = self.digits[index]
        image = image.roll((random.randint(-1, 1), random.randint(-1, 1)), dims=(1, 2))
        image = image * float(np.random.uniform(0.8, 1.2))
        return image + 0.05 * torch.randn(image.shape), label
