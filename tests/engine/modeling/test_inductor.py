"""Sums with a factor, compiled by inductor, are equal to eager ones."""

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine.modeling import build_model
from hookline.engine.modeling.inductor import PASS, exact_sums


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


def test_options_and_modes_are_merged_with_the_pass():
    merged = exact_sums({"options": {"max-autotune": True}, "dynamic": True})
    assert merged["dynamic"] is True
    assert merged["options"]["max_autotune"] is True
    assert merged["options"][PASS] is not None
    merged = exact_sums({"mode": "max-autotune-no-cudagraphs"})
    assert "mode" not in merged
    assert merged["options"]["coordinate_descent_tuning"] is True
    torch.compile(nn.Linear(2, 2), **merged)  # refuses options that it does not know


def test_a_pass_of_the_users_is_refused():
    with pytest.raises(ConfigError, match=f"{PASS} of torch.compile is set"):
        exact_sums({"options": {PASS: lambda graph: None}})


def test_equal_arguments_give_equal_backends():
    assert exact_sums({}) == exact_sums({"mode": "default"})


@pytest.mark.parametrize("args", [{"backend": "eager"}, {"mode": "fastest"}, {"mode": "default", "options": {}}])
def test_arguments_of_other_backends_and_wrong_arguments_do_not_change(args):
    assert exact_sums(args) == args
