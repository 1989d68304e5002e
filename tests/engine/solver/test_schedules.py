import math

import pytest
import torch
from small_runs import solver_config
from torch.optim.lr_scheduler import LambdaLR

from hookline.config import ConfigError
from hookline.engine.setup.check import check_config
from hookline.engine.solver import LR_SCHEDULER_REGISTRY, build_lr_scheduler
from hookline.engine.solver.schedules import resolve_lengths


def make_cfg(name, max_iter=20, warmup=0, args=None, STEPS=(), **solver):
    schedule = {"LR_SCHEDULER_NAME": name, "LR_SCHEDULER_ARGS": args or {}, "MAX_ITER": max_iter, "BASE_LR": 2.0}
    return solver_config(**schedule, WARMUP_ITERS=warmup, STEPS=STEPS, **solver)


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


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (make_cfg("WarmupConstantLR"), lambda i: 2.0),
        (make_cfg("WarmupMultiStepLR", STEPS=(5, 12)), lambda i: 2.0 * 0.1 ** ((i >= 5) + (i >= 12))),
        (make_cfg("WarmupMultiStepLR", 3, STEPS=(1, 2), GAMMA=0.5), lambda i: 2.0 * 0.5 ** ((i >= 1) + (i >= 2))),
        (make_cfg("WarmupStepWithFixedGammaLR", GAMMA=0.5), lambda i: 2.0 * 0.5 ** min(i // 5, 3)),
        (make_cfg("WarmupStepWithFixedGammaLR", 10, NUM_DECAYS=2), lambda i: 2.0 * 0.1 ** min(3 * i // 10, 2)),
        (make_cfg("WarmupCosineLR", BASE_LR_END=0.5), lambda i: 0.5 + 0.75 * (1 + math.cos(math.pi * i / 20))),
        (  # the formula of Hugging Face's get_cosine_schedule_with_warmup
            make_cfg("WarmupCosineLR", 25, 5, WARMUP_FACTOR=0.0, RESCALE_INTERVAL=True),
            lambda i: 2 * i / 5 if i < 5 else 1 + math.cos(math.pi * (i - 5) / 20),
        ),
        (make_cfg("WarmupStepLR", args={"step_size": 6}, GAMMA=0.5), lambda i: 2.0 * 0.5 ** (i // 6)),
        (make_cfg("WarmupLinearLR", BASE_LR_END=0.5), lambda i: 2.0 - 1.5 * i / 20),
        (make_cfg("WarmupPolynomialLR", args={"power": 2.0}), lambda i: 2.0 * (1 - i / 20) ** 2),
        (make_cfg("WarmupExponentialLR", args={"decay": 0.25}), lambda i: 2.0 * 0.25 ** (i / 20)),
        (make_cfg("WarmupInverseSqrtLR", args={"timescale": 4}), lambda i: 2.0 * math.sqrt(4 / max(i, 4))),
        (make_cfg("WarmupInverseSqrtLR", 20, 5, WARMUP_FACTOR=0.0), lambda i: 2 * min(i / 5, (5 / max(i, 5)) ** 0.5)),
        (make_cfg("WarmupStableDecayLR", args={"decay_fraction": 0.25}), lambda i: 2.0 * min(1, (20 - i) / 5)),
    ],
    ids=lambda value: value.SOLVER.LR_SCHEDULER_NAME if hasattr(value, "SOLVER") else "",
)
def test_value_is_right_at_every_step(cfg, expected):
    values = learning_rates(cfg)
    assert values == pytest.approx([expected(i) for i in range(len(values))])


def test_every_registered_schedule_is_defined_from_first_to_last_step():
    for name, _ in LR_SCHEDULER_REGISTRY:
        for max_iter in (1, 2, 20):
            for warmup in (0, 3):
                values = learning_rates(make_cfg(name, max_iter, warmup))
                assert all(0 <= value <= 2.0 for value in values), name


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (make_cfg("WarmupMultiStepLR", STEPS=(5, 3)), "ascending"),
        (make_cfg("WarmupCosineLR", BASE_LR_END=3.0), "BASE_LR_END"),
        (make_cfg("WarmupStableDecayLR", args={"decay_fraction": 0.0}), "decay_fraction"),
    ],
)
def test_impossible_settings_are_named(cfg, message):
    with pytest.raises(ConfigError, match=message):
        learning_rates(cfg)


TORCH = "torch.optim.lr_scheduler:"


def lambda_lr(optimizer, total: int):
    """A function that takes the optimizer, as those of Hugging Face do."""
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / total)
    scheduler.given = total
    return scheduler


def build(name, args, max_iter="4ep", interval="iteration"):
    """Build a scheduler of a run with ten iterations per epoch."""
    cfg = make_cfg(name, max_iter, args=args, LR_SCHEDULER_INTERVAL=interval)
    check_config(cfg)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return build_lr_scheduler(resolve_lengths(cfg, 10), optimizer)


ONE_CYCLE = {"max_lr": 1.0, "epochs": "epochs", "steps_per_epoch": "iters_per_epoch"}


@pytest.mark.parametrize(
    ("name", "args", "options", "built"),
    [
        (TORCH + "MultiStepLR", {"milestones": ["1ep", "15it", 30, "3.5ep"]}, {}, {"milestones": [10, 15, 30, 35]}),
        (TORCH + "StepLR", {"step_size": "2ep"}, {}, {"step_size": 20}),
        (TORCH + "StepLR", {"step_size": "2ep"}, {"interval": "epoch"}, {"step_size": 2}),
        (TORCH + "CosineAnnealingLR", {"T_max": "end"}, {"max_iter": 40, "interval": "epoch"}, {"T_max": 4}),
        (TORCH + "CosineAnnealingLR", {"T_max": "epochs"}, {"max_iter": 35}, {"T_max": 4}),  # a part counts
        (TORCH + "OneCycleLR", ONE_CYCLE, {}, {"total_steps": 40}),
        (f"{__name__}:lambda_lr", {"total": "end"}, {}, {"given": 40}),
        ("small_runs:TimmLike", {"t_initial": "end"}, {}, {"t_initial": 4}),
        ("small_runs:TimmLike", {"t_initial": "end", "t_in_epochs": False}, {}, {"t_initial": 40}),
    ],
)
def test_lengths_are_steps_of_what_the_scheduler_counts(name, args, options, built):
    scheduler = build(name, args, **options)
    found = {key: getattr(scheduler, key) for key in built}
    assert {key: sorted(value) if key == "milestones" else value for key, value in found.items()} == built


def test_without_a_trainer_only_epochs_are_unknown():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    cosine = make_cfg(TORCH + "CosineAnnealingLR", 40, args={"T_max": "end"})
    assert build_lr_scheduler(cosine, optimizer).T_max == 40
    with pytest.raises(ConfigError, match=r"LR_SCHEDULER_ARGS\.step_size: '2ep'"):
        build_lr_scheduler(make_cfg(TORCH + "StepLR", 40, args={"step_size": "2ep"}), optimizer)
    for value in ("2h", "2epo"):
        with pytest.raises(ConfigError, match=rf"LR_SCHEDULER_ARGS.step_size: .*'{value}'"):
            build_lr_scheduler(make_cfg(TORCH + "StepLR", 40, args={"step_size": value}), optimizer)
