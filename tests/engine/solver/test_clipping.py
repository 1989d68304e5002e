import pytest
import torch
from small_runs import solver_config
from torch import nn

from hookline.engine.solver import build_optimizer, maybe_add_gradient_clipping
from hookline.engine.solver.clipping import build_grad_clipper


def make_cfg(clip_type="norm", value=1.0, norm_type=2.0, enabled=True, **solver):
    clip = {"ENABLED": enabled, "CLIP_TYPE": clip_type, "CLIP_VALUE": value, "NORM_TYPE": norm_type}
    return solver_config(CLIP_GRADIENTS=clip, **solver)


@pytest.mark.parametrize("as_class", [False, True])
def test_optimizer_clips_in_its_step(as_class):
    parameters = [nn.Parameter(torch.zeros(3, width)) for width in (1, 2, 3)]
    for parameter in parameters[:-1]:  # the last has no gradient
        parameter.grad = torch.full_like(parameter, 10.0)
    if as_class:
        optimizer = maybe_add_gradient_clipping(make_cfg(), torch.optim.SGD)(parameters, lr=1.0)
    else:
        original = torch.optim.SGD(parameters, lr=1.0)
        optimizer = maybe_add_gradient_clipping(make_cfg(), original)
        assert optimizer is original
    assert isinstance(optimizer, torch.optim.SGD)
    optimizer.step()
    assert torch.cat([p.detach().flatten() for p in parameters]).norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(
    ("clip_type", "norm_type"),
    [(None, 2.0), ("value", 2.0), ("param_norm", 2.0), ("norm", 1.0), ("norm", 2.0), ("norm", float("inf"))],
)
def test_the_norm_can_be_logged_with_and_without_clipping(clip_type, norm_type):
    cfg = make_cfg(clip_type or "norm", 1.0, norm_type, enabled=clip_type is not None)
    cfg.LOG.GRAD_NORM = True
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1))]
    gradients = torch.tensor([3.0, 0.4]), torch.tensor([[4.0]]), torch.tensor([0.1])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    parameters.append(nn.Parameter(torch.zeros(1)))  # without a gradient
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm(norm_type).item()
    assert build_grad_clipper(cfg)(parameters).item() == pytest.approx(norm)
    expected = {
        None: lambda gradient: gradient,
        "value": lambda gradient: gradient.clamp(-1, 1),
        "param_norm": lambda gradient: gradient / max(1.0, gradient.norm()),
        "norm": lambda gradient: gradient / norm,
    }[clip_type]
    for parameter, gradient in zip(parameters, gradients, strict=False):
        torch.testing.assert_close(parameter.grad, expected(gradient))
    cfg.LOG.GRAD_NORM = False
    assert (build_grad_clipper(cfg) is None) == (clip_type is None)


@pytest.mark.parametrize("clip_type", ["norm", "full_model"])
@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_built_from_a_config_clips_in_a_plain_loop(scaled, clip_type):
    net = nn.Linear(3, 2)
    before = torch.cat([p.detach().flatten().clone() for p in net.parameters()])
    cfg = make_cfg(clip_type, 0.5, MOMENTUM=0.0, WEIGHT_DECAY=0.0, BASE_LR=1.0)
    optimizer, scaler = build_optimizer(cfg, net), torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    scaler.scale(100 * net(torch.ones(4, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert (after - before).norm().item() == pytest.approx(0.5, rel=1e-5)
