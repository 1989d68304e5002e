import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from hookline.config import ConfigError, get_cfg
from hookline.engine.resume.lengths import resolve_lengths
from hookline.engine.solver import build_lr_scheduler, check_solver

TORCH = "torch.optim.lr_scheduler:"


def lambda_lr(optimizer, total: int, mode: str = "end"):
    """A function that takes the optimizer, as those of Hugging Face do."""
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / total)
    scheduler.given = (total, mode)
    return scheduler


class Updates:
    """A scheduler with the interface of timm's."""

    def __init__(self, optimizer, t_initial: int, t_in_epochs: bool = True):
        self.t_initial = t_initial

    def step(self, epoch, metric=None):
        pass

    def step_update(self, num_updates, metric=None):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def make_cfg(name, args, max_iter="4ep", interval="iteration", eval_period=0):
    cfg = get_cfg()
    cfg.SOLVER.LR_SCHEDULER_NAME = name
    cfg.SOLVER.LR_SCHEDULER_ARGS.update(args)
    cfg.SOLVER.LR_SCHEDULER_INTERVAL = interval
    cfg.SOLVER.MAX_ITER = max_iter
    cfg.SOLVER.STEPS, cfg.SOLVER.WARMUP_ITERS = (), 0
    cfg.TEST.EVAL_PERIOD = eval_period
    return cfg


def build(cfg, iters_per_epoch=10):
    check_solver(cfg)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return build_lr_scheduler(resolve_lengths(cfg, iters_per_epoch), optimizer)


def test_durations_are_steps_of_a_scheduler_that_counts_iterations():
    scheduler = build(make_cfg(TORCH + "MultiStepLR", {"milestones": ["1ep", "15it", 30, "3.5ep"]}))
    assert sorted(scheduler.milestones) == [10, 15, 30, 35]


@pytest.mark.parametrize(
    ("interval", "eval_period", "steps"), [("iteration", 0, 20), ("epoch", 0, 2), ("evaluation", 5, 4)]
)
def test_durations_are_steps_of_a_scheduler_that_counts_something_else(interval, eval_period, steps):
    cfg = make_cfg(TORCH + "StepLR", {"step_size": "2ep"}, interval=interval, eval_period=eval_period)
    assert build(cfg).step_size == steps


@pytest.mark.parametrize(("interval", "steps"), [("iteration", 40), ("epoch", 4), ("evaluation", 8)])
@pytest.mark.parametrize("max_iter", ["4ep", 40])
def test_end_is_the_number_of_steps_in_the_run(interval, steps, max_iter):
    args = {"T_max": "end"}
    cfg = make_cfg(TORCH + "CosineAnnealingLR", args, max_iter, interval, eval_period="0.5ep")
    assert build(cfg).T_max == steps


def test_names_of_values():
    args = {"max_lr": 1.0, "epochs": "epochs", "steps_per_epoch": "iters_per_epoch"}
    assert build(make_cfg(TORCH + "OneCycleLR", args)).total_steps == 40
    assert build(make_cfg(TORCH + "OneCycleLR", {"max_lr": 1.0, "total_steps": "max_iter"})).total_steps == 40
    assert build(make_cfg(TORCH + "CosineAnnealingLR", {"T_max": "epochs"}, 35)).T_max == 4  # a part counts


def test_hooklines_schedules_take_them_too():
    scheduler = build(make_cfg("WarmupStableDecayLR", {"decay_iters": "1ep"}))
    assert [scheduler._multiplier(iteration / 40) for iteration in (30, 35)] == [1.0, 0.5]


def test_a_function_that_takes_the_optimizer_builds_a_scheduler():
    scheduler = build(make_cfg(f"{__name__}:lambda_lr", {"total": "end", "mode": "epochs"}))
    assert scheduler.given == (40, "epochs")  # texts stay texts


@pytest.mark.parametrize(("args", "steps"), [({}, 4), ({"t_in_epochs": False}, 40)])
def test_timms_schedulers_count_epochs_or_updates(args, steps):
    assert build(make_cfg(f"{__name__}:Updates", {"t_initial": "end", **args})).t_initial == steps


def test_without_a_trainer_only_epochs_are_unknown():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    assert build_lr_scheduler(make_cfg(TORCH + "CosineAnnealingLR", {"T_max": "end"}, 40), optimizer).T_max == 40
    with pytest.raises(ConfigError, match=r"LR_SCHEDULER_ARGS\.step_size: '2ep': the length of an epoch"):
        build_lr_scheduler(make_cfg(TORCH + "StepLR", {"step_size": "2ep"}, 40), optimizer)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (make_cfg(TORCH + "StepLR", {"step_size": "2h"}), "LR_SCHEDULER_ARGS.step_size: '2h' is a time"),
        (make_cfg(TORCH + "StepLR", {"step_size": "2epo"}), "LR_SCHEDULER_ARGS.step_size: expected int, got '2epo'"),
        (make_cfg(TORCH + "StepLR", {"step_size": 1}, interval="evaluation"), "TEST.EVAL_PERIOD: is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(cfg, message):
    with pytest.raises(ConfigError, match=message):
        check_solver(cfg)
