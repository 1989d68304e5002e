import logging
import math

import pytest
import torch

from hookline.config import ConfigError, get_cfg
from hookline.engine.solver import LR_SCHEDULER_REGISTRY, build_lr_scheduler


def make_cfg(name, max_iter=20, warmup=0, args=None, **solver):
    cfg = get_cfg()
    cfg.SOLVER.LR_SCHEDULER_NAME = name
    cfg.SOLVER.LR_SCHEDULER_ARGS.update(args or {})
    cfg.SOLVER.MAX_ITER = max_iter
    cfg.SOLVER.WARMUP_ITERS = warmup
    cfg.SOLVER.STEPS = ()
    cfg.SOLVER.BASE_LR = 2.0
    for key, value in solver.items():
        cfg.SOLVER[key] = value
    return cfg


def learning_rates(cfg):
    """Return the learning rate of every update, and the one after the last update."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=cfg.SOLVER.BASE_LR)
    scheduler = build_lr_scheduler(cfg, optimizer)
    values = [optimizer.param_groups[0]["lr"]]
    for _ in range(cfg.SOLVER.MAX_ITER):
        optimizer.step()
        scheduler.step()
        values.append(optimizer.param_groups[0]["lr"])
    return values


def wsd(i, decay):
    return 2.0 if i < 15 else 0.5 + 1.5 * decay((i - 15) / 5)


def sgdr(i, first, growth):
    """The equation of the SGDR paper, from 2.0 to 0.5: T_cur iterations into a cycle of T_i."""
    start, length = 0, first
    while i >= start + length and i < 35:
        start, length = start + length, length * growth
    return 0.5 + 0.75 * (1 + math.cos(math.pi * (i - start) / length))


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (make_cfg("WarmupConstantLR"), lambda i: 2.0),
        (make_cfg("ConstantLR"), lambda i: 2.0),
        (make_cfg("WarmupMultiStepLR", STEPS=(5, 12)), lambda i: 2.0 * 0.1 ** ((i >= 5) + (i >= 12))),
        (make_cfg("WarmupMultiStepLR", 3, STEPS=(1, 2), GAMMA=0.5), lambda i: 2.0 * 0.5 ** ((i >= 1) + (i >= 2))),
        (make_cfg("WarmupStepWithFixedGammaLR", GAMMA=0.5), lambda i: 2.0 * 0.5 ** min(i // 5, 3)),
        (make_cfg("WarmupStepWithFixedGammaLR", 10, NUM_DECAYS=2), lambda i: 2.0 * 0.1 ** min(3 * i // 10, 2)),
        (make_cfg("WarmupCosineLR", BASE_LR_END=0.5), lambda i: 0.5 + 0.75 * (1 + math.cos(math.pi * i / 20))),
        (
            make_cfg("WarmupCosineRestartsLR", args={"cycles": 4}),  # cycles of 5 iterations
            lambda i: 1 + math.cos(math.pi * (i % 5) / 5) if i < 20 else 0.0,
        ),
        (
            make_cfg("WarmupCosineRestartsLR", 35, BASE_LR_END=0.5, args={"cycles": 3, "growth": 2.0}),
            lambda i: sgdr(i, 5, 2),
        ),
        (
            make_cfg("WarmupCosineRestartsLR", 35, BASE_LR_END=0.5, args={"first_cycle": 5, "growth": 2.0}),
            lambda i: sgdr(i, 5, 2),
        ),
        (
            make_cfg("WarmupCosineRestartsLR", args={"cycles": 2, "decay": 0.5}),
            lambda i: (1 + math.cos(math.pi * (i % 10) / 10)) * (1 if i < 10 else 0.5) if i < 20 else 0.0,
        ),
        (make_cfg("WarmupStepLR", args={"step_size": 6}, GAMMA=0.5), lambda i: 2.0 * 0.5 ** (i // 6)),
        (
            make_cfg("WarmupStableDecayLR", BASE_LR_END=0.5, args={"decay_iters": 5}),
            lambda i: wsd(i, lambda x: 1 - x),
        ),
        (make_cfg("WarmupLinearLR", BASE_LR_END=0.5), lambda i: 2.0 - 1.5 * i / 20),
        (make_cfg("WarmupPolynomialLR", args={"power": 2.0}), lambda i: 2.0 * (1 - i / 20) ** 2),
        (make_cfg("WarmupExponentialLR", args={"decay": 0.25}), lambda i: 2.0 * 0.25 ** (i / 20)),
        (make_cfg("WarmupInverseSqrtLR", args={"timescale": 4}), lambda i: 2.0 * math.sqrt(4 / max(i, 4))),
        (
            make_cfg("WarmupInverseSqrtLR", warmup=5, WARMUP_FACTOR=0.0),
            lambda i: 2 * min(i / 5, (5 / max(i, 5)) ** 0.5),
        ),
        (
            make_cfg("WarmupStableDecayLR", BASE_LR_END=0.5, args={"decay_fraction": 0.25}),
            lambda i: wsd(i, lambda x: 1 - x),
        ),
        (
            make_cfg("WarmupStableDecayLR", BASE_LR_END=0.5, args={"decay_fraction": 0.25, "decay_method": "sqrt"}),
            lambda i: wsd(i, lambda x: 1 - math.sqrt(x)),
        ),
        (
            make_cfg("WarmupStableDecayLR", BASE_LR_END=0.5, args={"decay_fraction": 0.25, "decay_method": "cosine"}),
            lambda i: wsd(i, lambda x: (1 + math.cos(math.pi * x)) / 2),
        ),
    ],
    ids=lambda value: value.SOLVER.LR_SCHEDULER_NAME if hasattr(value, "SOLVER") else "",
)
def test_value_is_right_at_every_step(cfg, expected):
    values = learning_rates(cfg)
    assert values == pytest.approx([expected(i) for i in range(len(values))])


def test_one_cycle_matches_torch():
    values = learning_rates(make_cfg("OneCycleLR", 50, args={"pct_start": 0.4}))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    # torch counts one step less: its schedule ends with the last update
    reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2.0, total_steps=51, pct_start=21 / 51)
    expected = [optimizer.param_groups[0]["lr"]]
    for _ in range(50):
        optimizer.step()
        reference.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert values == pytest.approx(expected)


def test_restarts_match_torch():
    values = learning_rates(make_cfg("WarmupCosineRestartsLR", 35, args={"first_cycle": 5, "growth": 2.0}))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5, T_mult=2)
    for value in values[:-1]:
        assert value == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()


def test_restarts_begin_after_a_warmup_with_rescale_interval():
    cfg = make_cfg("WarmupCosineRestartsLR", 24, 4, {"cycles": 2}, WARMUP_FACTOR=0.0, RESCALE_INTERVAL=True)
    # the formula of Hugging Face's get_cosine_with_hard_restarts_schedule_with_warmup
    expected = [i / 4 if i < 4 else (1 + math.cos(math.pi * ((2 * (i - 4) / 20) % 1))) / 2 for i in range(24)]
    assert learning_rates(cfg)[:-1] == pytest.approx([2 * factor for factor in expected])


def test_a_warmup_with_rescale_interval_rises_to_the_full_rate():
    cfg = make_cfg("WarmupCosineLR", 25, 5, WARMUP_FACTOR=0.0, RESCALE_INTERVAL=True)
    # the formula of Hugging Face's get_cosine_schedule_with_warmup
    expected = [i / 5 if i < 5 else (1 + math.cos(math.pi * (i - 5) / 20)) / 2 for i in range(26)]
    assert learning_rates(cfg) == pytest.approx([2 * factor for factor in expected])


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("WarmupStableDecayLR", {"decay_iters": 10}, lambda i: min(1, (25 - i) / 10)),
        ("WarmupStepLR", {"step_size": 10}, lambda i: 0.1 ** ((i - 5) // 10)),
        ("WarmupCosineRestartsLR", {"first_cycle": 10}, lambda i: (1 + math.cos(math.pi * ((i - 5) % 10) / 10)) / 2),
        ("WarmupInverseSqrtLR", {"timescale": 10}, lambda i: math.sqrt(10 / max(i - 5, 10))),
    ],
)
def test_lengths_in_iterations_stay_those_with_rescale_interval(name, args, expected):
    rates = learning_rates(make_cfg(name, 25, 5, args, WARMUP_FACTOR=0.0, RESCALE_INTERVAL=True))
    assert rates[:25] == pytest.approx([2 * (i / 5 if i < 5 else expected(i)) for i in range(25)])


def test_every_registered_schedule_is_defined_from_first_to_last_step():
    for name, _ in LR_SCHEDULER_REGISTRY:
        for max_iter in (1, 2, 7, 1000):
            for warmup in (0,) if name == "OneCycleLR" else (0, 1, 3):
                values = learning_rates(make_cfg(name, max_iter, warmup))
                assert all(0 <= value <= 2.0 for value in values), name


def test_steps_beyond_the_end_are_ignored_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        values = learning_rates(make_cfg("WarmupMultiStepLR", 10, STEPS=(5, 10, 30)))
    assert values == pytest.approx([2.0] * 5 + [0.2] * 6)
    assert "SOLVER.STEPS" in caplog.text


def test_warmup_as_long_as_the_run_is_allowed(caplog):
    values = learning_rates(make_cfg("WarmupConstantLR", 10, warmup=1000, WARMUP_FACTOR=0.0))
    assert values == pytest.approx([0.2 * i for i in range(11)])
    assert "WARMUP_ITERS" in caplog.text


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (make_cfg("WarmupMultiStepLR", STEPS=(5, 3)), "ascending"),
        (make_cfg("WarmupCosineLR", BASE_LR_END=3.0), "BASE_LR_END"),
        (make_cfg("WarmupStableDecayLR", args={"decay_method": "cubic"}), "decay_method"),
        (make_cfg("OneCycleLR", args={"pct_start": 1.0}), "pct_start"),
        (make_cfg("WarmupCosineLR", 20, 20, WARMUP_METHOD="exponential"), "WARMUP_METHOD"),
    ],
)
def test_impossible_settings_are_named(cfg, message):
    with pytest.raises(ConfigError, match=message):
        learning_rates(cfg)
