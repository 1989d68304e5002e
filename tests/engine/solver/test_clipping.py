import copy

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine.solver import build_grad_clipper, maybe_add_gradient_clipping


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


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norm_is_the_global_norm(norm_type):
    parameters = make_parameters()
    before = global_norm(parameters, norm_type)
    direction = parameters[0].grad / before
    returned = build_grad_clipper(make_cfg("norm", 1.0, norm_type))(parameters)
    assert returned.item() == pytest.approx(before, rel=1e-5)
    assert global_norm(parameters, norm_type) == pytest.approx(1.0, rel=1e-5)
    assert torch.allclose(parameters[0].grad, direction, rtol=1e-4)


@pytest.mark.parametrize("clip_type", ["norm", "param_norm", "value"])
def test_small_gradients_do_not_change(clip_type):
    parameters = make_parameters(1e-3)
    before = [copy.deepcopy(p.grad) for p in parameters]
    build_grad_clipper(make_cfg(clip_type))(parameters)
    assert all(torch.equal(old, p.grad) for old, p in zip(before[:-1], parameters[:-1], strict=True))


@pytest.mark.parametrize("mixed", [False, True])
def test_param_norm_clips_each_parameter_separately(mixed):
    parameters = make_parameters()
    parameters[0].grad *= 1e-3
    if mixed:
        parameters[1] = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        parameters[1].grad = torch.full((3,), 5.0, dtype=torch.float64)
    small = parameters[0].grad.clone()
    assert build_grad_clipper(make_cfg("param_norm"))(parameters) is None
    assert torch.equal(parameters[0].grad, small)
    assert [p.grad.norm().item() for p in parameters[1:3]] == pytest.approx([1.0, 1.0], rel=1e-5)


def test_gradients_of_different_types_have_one_norm():
    parameters = make_parameters()[:1]
    parameters.append(nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    parameters[1].grad = torch.full((3,), 5.0, dtype=torch.float64)
    build_grad_clipper(make_cfg("norm"))(parameters)
    assert sum(p.grad.double().square().sum() for p in parameters).sqrt().item() == pytest.approx(1.0, rel=1e-5)


def test_value_limits_each_element():
    parameters = make_parameters()
    expected = [p.grad.clamp(-0.5, 0.5) for p in parameters[:-1]]
    assert build_grad_clipper(make_cfg("value", 0.5))(parameters) is None
    assert all(torch.equal(old, p.grad) for old, p in zip(expected, parameters[:-1], strict=True))


def test_nan_is_not_hidden():
    parameters = make_parameters()
    parameters[0].grad[0, 0] = float("nan")
    assert build_grad_clipper(make_cfg("norm"))(parameters).isnan()
    assert parameters[1].grad.isnan().all()


def test_parameters_without_gradients_are_ignored():
    parameters = make_parameters()[-1:]
    for clip_type in ("norm", "param_norm", "value"):
        build_grad_clipper(make_cfg(clip_type))(parameters)
    assert parameters[0].grad is None


def test_disabled_clipping_changes_nothing():
    optimizer = torch.optim.SGD(make_parameters(), lr=1.0)
    cfg = make_cfg(enabled=False)
    assert build_grad_clipper(cfg) is None
    assert maybe_add_gradient_clipping(cfg, optimizer) is optimizer
    assert maybe_add_gradient_clipping(cfg, torch.optim.SGD) is torch.optim.SGD


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


def test_gradients_of_a_closure_are_clipped():
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = maybe_add_gradient_clipping(make_cfg(), torch.optim.SGD([parameter], lr=1.0))

    def closure():
        optimizer.zero_grad()
        loss = (100 * parameter).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 0.0
    assert parameter.norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("number", [-1.0, 0.0, float("nan")])
@pytest.mark.parametrize("name", ["CLIP_VALUE", "NORM_TYPE"])
def test_numbers_that_are_not_positive_are_refused(name, number):
    cfg = make_cfg("norm")
    cfg.SOLVER.CLIP_GRADIENTS[name] = number
    with pytest.raises(ConfigError, match=rf"SOLVER\.CLIP_GRADIENTS\.{name}: must be greater than 0"):
        build_grad_clipper(cfg)


@pytest.mark.parametrize("clip", [None, "value", "param_norm", "norm"])
def test_the_norm_can_be_logged_with_and_without_clipping(clip):
    cfg = get_cfg()
    cfg.LOG.GRAD_NORM = True
    if clip:
        cfg.SOLVER.CLIP_GRADIENTS.ENABLED, cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = True, clip
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, 1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0]), torch.tensor([[4.0]])
    assert build_grad_clipper(cfg)(parameters).item() == 5.0
    clipped = {None: [3, 4], "value": [1, 1], "param_norm": [1, 1], "norm": [0.6, 0.8]}[clip]
    assert [parameter.grad.item() for parameter in parameters] == pytest.approx(clipped)
    cfg.LOG.GRAD_NORM = False
    assert (build_grad_clipper(cfg) is None) == (clip is None)
