"""Sums with a factor, compiled by inductor, are equal to eager ones; the check of vector instructions."""

import threading

import pytest
import torch
from torch import nn
from torch._inductor import cpu_vec_isa
from torch._inductor.custom_graph_pass import CustomGraphPass

from hookline.config import get_cfg
from hookline.engine.modeling import build_model, inductor
from hookline.engine.modeling.inductor import PASS, check_vectors, exact_sums


class Sums(nn.Module):
    """Weighted sums with a matrix product on either side."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))

    def forward(self, x):
        half = torch.add(x @ self.weight, x, alpha=0.5)
        double = torch.add(half, x @ self.weight.t(), alpha=2)
        return torch.add(x @ self.weight, double @ self.weight, alpha=0.25)


class Counting(CustomGraphPass):
    """A custom pass of the user."""

    calls = 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return None  # disables torch's cache, so the pass is called


def outputs_and_gradients(model):
    model.zero_grad()
    outputs = model(torch.linspace(-1, 1, 32).reshape(4, 8))
    outputs.square().mean().backward()
    with torch.inference_mode():
        predictions = model(torch.linspace(-1, 1, 32).reshape(4, 8))
    return outputs.detach(), model.weight.grad, predictions


@pytest.mark.slow
def test_alpha_is_kept_in_training_and_prediction_and_a_custom_pass_runs():
    expected, own = outputs_and_gradients(Sums()), Counting()
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.NAME = f"{__name__}:Sums"
    cfg.MODEL.COMPILE.ENABLED = True
    torch._inductor.config.post_grad_custom_pre_pass = own
    try:
        found = outputs_and_gradients(build_model(cfg))
    finally:
        torch._inductor.config.post_grad_custom_pre_pass = None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert own.calls > 0


def test_options_and_modes_are_merged_with_the_pass():
    own = Counting()
    merged = exact_sums({"options": {"max_autotune": True, "post-grad-custom-pre-pass": own}, "dynamic": True})
    assert merged["dynamic"] is True
    assert merged["options"]["max_autotune"] is True
    assert merged["options"]["post_grad_custom_pre_pass"].before == (own,)
    merged = exact_sums({"mode": "max-autotune-no-cudagraphs"})
    assert "mode" not in merged
    assert merged["options"]["coordinate_descent_tuning"] is True
    torch.compile(nn.Linear(2, 2), **merged)  # refuses options that it does not know


def test_equal_arguments_give_equal_backends():
    assert exact_sums({}) == exact_sums({"mode": "default"})


@pytest.mark.parametrize("args", [{"backend": "eager"}, {"mode": "fastest"}, {"mode": "default", "options": {}}])
def test_arguments_of_other_backends_and_wrong_arguments_do_not_change(args):
    assert exact_sums(args) == args


def test_vector_instructions_are_checked_in_a_thread_before_torch_looks_into_its_cache(monkeypatch):
    threads, may_end = [], threading.Event()

    def check():
        may_end.wait()
        threads.append(threading.current_thread())

    monkeypatch.setattr(inductor, "_checks", [])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", check)
    check_vectors()
    check_vectors()
    assert threads == []  # nobody waits for it yet
    may_end.set()
    exact_sums({})["options"][PASS].uuid()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
