"""The data: any data set that a DataLoader reads."""

import torch
from torch.utils.data import TensorDataset


def rings(size: int, seed: int = 0) -> TensorDataset:
    """Points (size, 2) on two rings around the origin, and which ring (size,) each is on."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (size,), generator=generator)
    angle = 6.2832 * torch.rand(size, generator=generator)
    radius = 1 + y + 0.2 * torch.randn(size, generator=generator)
    return TensorDataset(torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), y)
