"""The model."""

import torch
from torch import nn


class Net(nn.Module):
    """Scores (N, 2) for points (N, 2)."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)
