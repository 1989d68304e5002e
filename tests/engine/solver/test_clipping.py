import pytest
import torch
from torch import nn

from hookline.config import get_cfg
from hookline.engine.solver import build_optimizer, maybe_add_gradient_clipping
from hookline.engine.solver.clipping import build_grad_clipper


def make_cfg(clip_type="norm", value=1.0, norm_type=2.0, enabled=True):
    cfg = get_cfg()
    clip = cfg.SOLVER.CLIP_GRADIENTS
    clip.ENABLED, clip.CLIP_TYPE, clip.CLIP_VALUE, clip.NORM_TYPE = enabled, clip_type, value, norm_type
    return cfg


def make_parameters(scale=10.0):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(3, i + 1)) for i in range(4)]
    for parameter in parameters[:-1]:  # the last has no gradient
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    return parameters


def global_norm(parameters, norm_type=2.0):
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm(norm_type).item()


def clip(parameters, *settings):
    return build_grad_clipper(make_cfg(*settings))(parameters)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norm_is_the_global_norm(norm_type):
    parameters = make_parameters()
    before = global_norm(parameters, norm_type)
    direction = parameters[0].grad / before
    assert clip(parameters, "norm", 1.0, norm_type).item() == pytest.approx(before, rel=1e-5)
    assert global_norm(parameters, norm_type) == pytest.approx(1.0, rel=1e-5)
    assert torch.allclose(parameters[0].grad, direction, rtol=1e-4)


@pytest.mark.parametrize("as_class", [False, True])
def test_optimizer_clips_in_its_step(as_class):
    parameters = make_parameters()
    if as_class:
        optimizer = maybe_add_gradient_clipping(make_cfg(), torch.optim.SGD)(parameters, lr=1.0)
    else:
        original = torch.optim.SGD(parameters, lr=1.0)
        optimizer = maybe_add_gradient_clipping(make_cfg(), original)
        assert optimizer is original
    assert isinstance(optimizer, torch.optim.SGD)
    optimizer.step()
    assert torch.cat([p.detach().flatten() for p in parameters]).norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("clip_type", [None, "value", "param_norm", "norm"])
def test_the_norm_can_be_logged_with_and_without_clipping(clip_type):
    cfg = get_cfg()
    cfg.LOG.GRAD_NORM = True
    if clip_type:
        cfg.SOLVER.CLIP_GRADIENTS.ENABLED, cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = True, clip_type
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1))]
    gradients = torch.tensor([3.0, 0.4]), torch.tensor([[4.0]]), torch.tensor([0.1])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    parameters.append(nn.Parameter(torch.zeros(1)))  # without a gradient
    norm = (9 + 0.16 + 16 + 0.01) ** 0.5
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


def built(net, clip_type="norm"):
    cfg = make_cfg(clip_type, 0.5)
    cfg.SOLVER.MOMENTUM, cfg.SOLVER.WEIGHT_DECAY, cfg.SOLVER.BASE_LR = 0.0, 0.0, 1.0
    return build_optimizer(cfg, net)


@pytest.mark.parametrize("clip_type", ["norm", "full_model"])
@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_built_from_a_config_clips_in_a_plain_loop(scaled, clip_type):
    net = nn.Linear(3, 2)
    before = torch.cat([p.detach().flatten().clone() for p in net.parameters()])
    optimizer, scaler = built(net, clip_type), torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    scaler.scale(100 * net(torch.ones(4, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert (after - before).norm().item() == pytest.approx(0.5, rel=1e-5)
