import pytest
import torch
from fvcore.common.param_scheduler import (
    ConstantParamScheduler,
    CosineParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    ParamScheduler,
    StepWithFixedGammaParamScheduler,
)

from hookline.config import ConfigError
from hookline.engine.solver import LRMultiplier, WarmupParamScheduler
from hookline.hooks.control.lr_scheduler import FunctionSchedule, value_at


class Adjustable(ParamScheduler):
    factor = 1.0

    def __call__(self, where):
        return self.factor


def make_optimizer(*lrs):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (1.0,)])


def learning_rates(schedule, max_iter, optimizer=None):
    """Return the learning rate of every update, and the one after the last update."""
    optimizer = optimizer or make_optimizer()
    multiplier = LRMultiplier(optimizer, schedule, max_iter)
    values = [optimizer.param_groups[0]["lr"]]
    for _ in range(max_iter):
        optimizer.step()
        multiplier.step()
        values.append(optimizer.param_groups[0]["lr"])
    return values


def test_multistep_with_linear_warmup_is_right_at_every_step():
    multistep = MultiStepParamScheduler([1.0, 0.1, 0.01, 0.001], milestones=[10, 15, 20], num_updates=30)
    values = learning_rates(WarmupParamScheduler(multistep, 0.001, 5 / 30), 30, make_optimizer(5.0))
    expected = [5 * (0.001 + 0.999 * i / 5) for i in range(5)] + [5.0] * 5 + [0.5] * 5 + [0.05] * 5 + [0.005] * 11
    assert values == pytest.approx(expected)


def test_groups_keep_their_ratio():
    optimizer = make_optimizer(1.0, 0.1)
    LRMultiplier(optimizer, CosineParamScheduler(0.5, 0.0), 10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])


@pytest.mark.parametrize(
    "schedule",
    [
        ConstantParamScheduler(0.5),
        StepWithFixedGammaParamScheduler(base_value=4.0, num_decays=3, gamma=0.5, num_updates=12),
    ],
)
@pytest.mark.parametrize("warmup", [0.0, 0.25, 1.0])
def test_schedules_that_are_undefined_at_the_end_keep_their_last_value(schedule, warmup):
    values = learning_rates(WarmupParamScheduler(schedule, 1.0, warmup), 12)
    assert values[-1] == pytest.approx(0.5)


def test_schedule_keeps_its_last_value_after_max_iter():
    optimizer = make_optimizer()
    multiplier = LRMultiplier(optimizer, CosineParamScheduler(1.0, 0.1), 4)
    for _ in range(7):
        optimizer.step()
        multiplier.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("linear", [0.01, 0.2575, 0.505, 0.7525, 1.0]),
        ("constant", [0.01, 0.01, 0.01, 0.01, 1.0]),
        ("exponential", [0.01, 0.01**0.75, 0.1, 0.01**0.25, 1.0]),
    ],
)
def test_warmup_methods(method, expected):
    values = learning_rates(WarmupParamScheduler(ConstantParamScheduler(1.0), 0.01, 4 / 8, method), 8)
    assert values[:5] == pytest.approx(expected)


def test_warmup_ends_at_the_value_of_the_schedule():
    values = learning_rates(WarmupParamScheduler(CosineParamScheduler(1.0, 0.0), 0.0, 0.5), 10)
    assert values[5] == pytest.approx(0.5)  # the cosine starts at iteration 0
    assert values[4] == pytest.approx(0.4)


def test_rescaled_schedule_runs_completely_after_the_warmup():
    schedule = WarmupParamScheduler(CosineParamScheduler(1.0, 0.0), 0.0, 0.5, rescale_interval=True)
    values = learning_rates(schedule, 10)
    assert values[5] == pytest.approx(1.0)
    assert values[-1] == pytest.approx(0.0)


@pytest.mark.parametrize("max_iter", [1, 63, 64, 65, 200])
@pytest.mark.parametrize(
    "schedule",
    [
        WarmupParamScheduler(CosineParamScheduler(1.0, 0.01), 0.001, 0.1),
        WarmupParamScheduler(FunctionSchedule(lambda it: 0.1 ** (it // 50), 200), 0.001, 0.1),
        MultiStepParamScheduler([1.0, 0.1, 0.01], milestones=[70, 150], num_updates=200),
    ],
)
def test_precomputed_rates_are_bitwise_equal_to_the_schedule(schedule, max_iter):
    rates = learning_rates(schedule, max_iter, make_optimizer(0.3))
    assert rates == [0.3 * value_at(schedule, it / max_iter) for it in range(max_iter + 1)]


def test_a_custom_schedule_is_called_in_each_step():
    schedule, optimizer = Adjustable(), make_optimizer()
    multiplier = LRMultiplier(optimizer, WarmupParamScheduler(schedule, 1.0, 0.0), 100)
    for factor in (1.0, 0.5, 0.25):
        schedule.factor = factor
        optimizer.step()
        multiplier.step()
        assert optimizer.param_groups[0]["lr"] == factor


def test_a_tensor_learning_rate_is_changed_in_place():
    rate = torch.tensor(1.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    multiplier = LRMultiplier(optimizer, CosineParamScheduler(1.0, 0.0), 10)
    for _ in range(5):
        optimizer.step()
        multiplier.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.5)


def test_step_counts_are_exact_in_long_runs():
    n = 5_000_000
    schedule = WarmupParamScheduler(ConstantParamScheduler(1.0), 0.0, 1000 / n, "constant")
    assert schedule(999 / n) == 0.0
    assert schedule(1000 / n) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0.1, 1.5), "warmup_length"), ((0.1, 0.5, "cubic"), "warmup_method"), ((0.0, 0.5, "exponential"), "positive")],
)
def test_impossible_warmups_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        WarmupParamScheduler(ConstantParamScheduler(1.0), *arguments)


def test_state_is_plain_numbers_and_continues_the_schedule():
    def make():
        optimizer = make_optimizer(2.0)
        return optimizer, LRMultiplier(optimizer, CosineParamScheduler(1.0, 0.0), 10)

    optimizer, multiplier = make()
    for _ in range(4):
        optimizer.step()
        multiplier.step()
    state = multiplier.state_dict()
    assert state == {"base_lrs": [2.0], "last_epoch": 4}

    resumed_optimizer, resumed = make()
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(state)
    assert resumed.get_last_lr() == multiplier.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    for scheduler, owner in ((multiplier, optimizer), (resumed, resumed_optimizer)):
        owner.step()
        scheduler.step()
    assert resumed_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="ParamScheduler"):
        LRMultiplier(make_optimizer(), lambda where: 1.0, 10)
    with pytest.raises(ValueError, match="max_iter"):
        LRMultiplier(make_optimizer(), ConstantParamScheduler(1.0), 0)


def steps(optimizer, multiplier, count):
    for _ in range(count):
        optimizer.step()
        multiplier.step()


def test_a_new_length_or_schedule_takes_effect_at_the_next_step():
    optimizer = make_optimizer()
    multiplier = LRMultiplier(optimizer, LinearParamScheduler(1.0, 0.0), 100)
    steps(optimizer, multiplier, 10)
    multiplier._max_iter = 1000
    steps(optimizer, multiplier, 1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 - 11 / 1000)
    multiplier._multiplier = ConstantParamScheduler(0.25)
    steps(optimizer, multiplier, 1)
    assert optimizer.param_groups[0]["lr"] == 0.25
    multiplier._multiplier = schedule = Adjustable()
    for factor in (0.5, 0.125):
        schedule.factor = factor
        steps(optimizer, multiplier, 1)
        assert optimizer.param_groups[0]["lr"] == factor


def test_a_group_added_during_a_run_follows_the_schedule_from_its_own_rate():
    optimizer = make_optimizer(1.0)
    multiplier = LRMultiplier(optimizer, LinearParamScheduler(1.0, 0.0), 100)
    steps(optimizer, multiplier, 10)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5})
    steps(optimizer, multiplier, 10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.8, 0.4])
    assert multiplier.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    assert multiplier.state_dict()["base_lrs"] == [1.0, 0.5]


def test_removed_groups_are_an_error_that_says_what_to_do():
    optimizer = make_optimizer(1.0, 0.5)
    multiplier = LRMultiplier(optimizer, LinearParamScheduler(1.0, 0.0), 100)
    steps(optimizer, multiplier, 3)
    del optimizer.param_groups[0]
    with pytest.raises(ConfigError, match=r"has 1 parameter groups, and had 2.*make a new scheduler"):
        multiplier.step()
