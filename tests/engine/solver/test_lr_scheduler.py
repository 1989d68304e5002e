import math

import pytest
import torch
from fvcore.common.param_scheduler import ConstantParamScheduler

from hookline.engine.solver import (
    LRMultiplier,
    LRScheduler,
    WarmupCosineLR,
    WarmupMultiStepLR,
    WarmupParamScheduler,
)


def make_optimizer(*lrs):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (1.0,)])


def advance(multiplier, count=1):
    """Return the learning rate of so many updates, and the one after them."""
    group = multiplier.optimizer.param_groups[0]
    values = [float(group["lr"])]
    for _ in range(count):
        multiplier.optimizer.step()
        multiplier.step()
        values.append(float(group["lr"]))
    return values


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("linear", [0.01, 0.2575, 0.505, 0.7525, 1.0]),
        ("constant", [0.01, 0.01, 0.01, 0.01, 1.0]),
        ("exponential", [0.01, 0.01**0.75, 0.1, 0.01**0.25, 1.0]),
    ],
)
def test_warmup_methods(method, expected):
    schedule = WarmupParamScheduler(ConstantParamScheduler(1.0), 0.01, 4 / 8, method)
    assert advance(LRMultiplier(make_optimizer(1.0), schedule, 8), 8)[:5] == pytest.approx(expected)


def test_the_schedules_of_detectron2():
    multi_step = WarmupMultiStepLR(make_optimizer(5.0), [10, 15], gamma=0.1, warmup_factor=0.001, warmup_iters=5)
    assert isinstance(multi_step, LRScheduler)
    expected = [0.005, 1.004, 2.003, 3.002, 4.001] + [5.0] * 5 + [0.5] * 5 + [0.05] * 6
    assert advance(multi_step, 20) == pytest.approx(expected)
    options = {"warmup_factor": 0.1, "warmup_iters": 2, "warmup_method": "constant"}
    cosine = [2.5 * (1 + math.cos(math.pi * i / 20)) for i in range(21)]
    expected = [0.1 * rate for rate in cosine[:2]] + cosine[2:]
    assert advance(WarmupCosineLR(make_optimizer(5.0), 20, **options), 20) == pytest.approx(expected)
    with pytest.raises(ValueError, match="ascending"):
        WarmupMultiStepLR(make_optimizer(), [15, 10])


def test_their_arguments_are_attributes_which_count():
    schedule = WarmupMultiStepLR(make_optimizer(), [2, 4], gamma=0.1, warmup_iters=0)
    schedule.gamma = 0.5
    assert (schedule.milestones, schedule.warmup_iters) == ([2, 4], 0)
    assert advance(schedule, 4) == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert "gamma" not in schedule.state_dict()
