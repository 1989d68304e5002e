import math

import pytest
import torch
from torch import nn

from hookline.engine.solver import LRScheduler, WarmupCosineLR, WarmupMultiStepLR, reduce_param_groups
from hookline.engine.solver.lr_scheduler import _get_warmup_factor_at_iter


def rates(scheduler, number):
    found = []
    for _ in range(number):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def optimizer():
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=5.0)


def test_multi_step_with_warmup():
    scheduler = WarmupMultiStepLR(optimizer(), [10, 15], gamma=0.1, warmup_factor=0.001, warmup_iters=5)
    assert isinstance(scheduler, LRScheduler)
    assert rates(scheduler, 20) == pytest.approx(
        [0.005, 1.004, 2.003, 3.002, 4.001] + [5.0] * 5 + [0.5] * 5 + [0.05] * 5
    )
    with pytest.raises(ValueError, match="ascending"):
        WarmupMultiStepLR(optimizer(), [15, 10])


def test_cosine_with_constant_warmup():
    scheduler = WarmupCosineLR(optimizer(), 20, warmup_factor=0.1, warmup_iters=2, warmup_method="constant")
    cosine = [2.5 * (1 + math.cos(math.pi * i / 20)) for i in range(20)]
    assert rates(scheduler, 20) == pytest.approx([0.1 * rate for rate in cosine[:2]] + cosine[2:])


def test_the_factor_of_a_warmup():
    assert [_get_warmup_factor_at_iter("linear", i, 4, 0.2) for i in (0, 2, 4)] == pytest.approx([0.2, 0.6, 1.0])
    with pytest.raises(ValueError, match="unknown warm-up method 'sudden'"):
        _get_warmup_factor_at_iter("sudden", 0, 4, 0.2)


def test_a_later_group_of_the_same_parameter_overrides_the_earlier():
    groups = [
        {"params": ["a", "b"], "lr": 1.0, "weight_decay": 3.0},
        {"params": ["b", "c"], "lr": 2.0},
        {"params": ["d"], "lr": 2.0, "weight_decay": 3.0},
    ]
    assert reduce_param_groups(groups) == [
        {"params": ["a"], "lr": 1.0, "weight_decay": 3.0},
        {"params": ["b", "d"], "lr": 2.0, "weight_decay": 3.0},
        {"params": ["c"], "lr": 2.0},
    ]
