"""Sums with a factor, compiled by inductor, are equal to eager ones."""

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine.modeling import build_model
from hookline.engine.modeling.inductor import PASS, use_exact_sums


class Sums(nn.Module):
    """Weighted sums with a matrix product on either side."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))

    def forward(self, x):
        half = torch.add(x @ self.weight, x, alpha=0.5)
        double = torch.add(half, x @ self.weight.t(), alpha=2)
        return torch.add(x @ self.weight, double @ self.weight, alpha=0.25)


def outputs_and_gradients(model):
    model.zero_grad()
    outputs = model(torch.linspace(-1, 1, 32).reshape(4, 8))
    outputs.square().mean().backward()
    with torch.inference_mode():
        predictions = model(torch.linspace(-1, 1, 32).reshape(4, 8))
    return outputs.detach(), model.weight.grad, predictions


@pytest.mark.slow
def test_alpha_is_kept_in_training_and_prediction():
    expected = outputs_and_gradients(Sums())
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.NAME = f"{__name__}:Sums"
    cfg.MODEL.COMPILE.ENABLED = True
    found = outputs_and_gradients(build_model(cfg))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_pass_of_the_users_is_refused():
    with pytest.raises(ConfigError, match=f"{PASS} of torch.compile is set"):
        use_exact_sums({"options": {PASS: lambda graph: None}})
