"""Sums with a factor, compiled by inductor, are equal to eager ones."""

import pytest
import torch
from torch import nn

from hookline.config import get_cfg
from hookline.engine.modeling import build_model


class Sums(nn.Module):
    """Weighted sums with a matrix product on either side."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))

    def forward(self, x):
        half = torch.add(x @ self.weight, x, alpha=0.5)
        double = torch.add(half, x @ self.weight.t(), alpha=2)
        return torch.add(x @ self.weight, double @ self.weight, alpha=0.25)


@pytest.mark.slow
@torch.no_grad()
def test_alpha_is_kept():
    x, cfg = torch.linspace(-1, 1, 32).reshape(4, 8), get_cfg()
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "MODEL.NAME", f"{__name__}:Sums", "MODEL.COMPILE.ENABLED", True])
    torch.testing.assert_close(build_model(cfg)(x), Sums()(x), rtol=1e-4, atol=1e-5)
