import functools

import pytest
import torch
from fvcore.common.param_scheduler import LinearParamScheduler
from metric_runs import at
from small_runs import Net, TimmLike, make_trainer

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.solver import LRMultiplier
from hookline.hooks import EvalHook, HookBase, LRScheduler, PeriodicCheckpointer

SCHEDULERS = torch.optim.lr_scheduler


def small_trainer(*hooks):
    """A trainer with a rate of 1 and three batches per epoch."""
    torch.manual_seed(0)
    return make_trainer(*hooks, model=Net(), data=[torch.ones(1, 2)] * 3, lr=1.0)


class Rates(HookBase):
    """The learning rate of each update."""

    def __init__(self):
        self.used = []

    def before_optimizer_step(self):
        self.used.append(self.trainer.optimizer.param_groups[0]["lr"])


def train(make, *hooks, folder=None, stop=0, resume=False, end=7, **arguments):
    """Train with a schedule that ``make`` makes of the optimizer; return the rates and the trainer.

    With a folder the run ends with a checkpoint, also if it is stopped before the iteration ``stop``.
    """
    trainer = small_trainer(rates := Rates(), at(stop - 1, lambda t: t.request_stop("here")))
    trainer.scheduler = make(trainer.optimizer)
    trainer.register_hooks([LRScheduler(scheduler=trainer.scheduler, **arguments), *hooks])
    if folder:
        checkpointer = Checkpointer(trainer.model, str(folder), trainer=trainer)
        trainer.register_hooks([PeriodicCheckpointer(checkpointer, 100)])
        checkpointer.resume_or_load("", resume=resume)
    trainer.train(trainer.iter + 1 if resume else 0, end)
    return rates.used, trainer


class Capped(LRMultiplier):
    """A schedule whose rates are computed by its own ``get_lr()``."""

    def __init__(self, optimizer):
        super().__init__(optimizer, LinearParamScheduler(1.0, 0.3), 7)

    def get_lr(self):
        return [max(rate, 0.75) for rate in super().get_lr()]


# Of a scheduler: the arguments of the hook, and the rates of seven iterations in epochs of three.
KINDS = {
    "torch": (lambda opt: SCHEDULERS.StepLR(opt, 3, 0.1), {}, [1, 1, 1, 0.1, 0.1, 0.1, 0.01]),
    "torch by epochs": (
        lambda opt: SCHEDULERS.ExponentialLR(opt, 0.5),
        {"interval": "epoch"},
        [1, 1, 1, 0.5, 0.5, 0.5, 0.25],
    ),
    "fvcore": (lambda opt: LinearParamScheduler(1.0, 0.3), {}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]),
    "own get_lr": (Capped, {}, [1, 0.9, 0.8, 0.75, 0.75, 0.75, 0.75]),
    "timm by epochs": (lambda opt: TimmLike(opt), {}, [1, 1, 1, 1 / 2, 1 / 2, 1 / 2, 1 / 3]),
    "timm by updates": (
        lambda opt: TimmLike(opt, 1, False),
        {},
        [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6, 1 / 7],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_scheduler_sets_the_rates_and_a_resumed_one_continues_exactly(kind, tmp_path):
    make, arguments, expected = KINDS[kind]
    whole, trainer = train(make, **arguments)
    assert whole == pytest.approx(expected)
    assert [value for value, _ in trainer.storage.history("lr").values()] == whole
    assert trainer.storage.smoothing_hints()["lr"] is False
    first, _ = train(make, folder=tmp_path, stop=3, **arguments)
    second, resumed = train(make, folder=tmp_path, resume=True, **arguments)
    assert first + second == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(resumed.model.state_dict(), trainer.model.state_dict(), rtol=1e-12, atol=0)


FOLLOWING = {
    "fvcore": lambda opt: LinearParamScheduler(1.0, 0.3),
    "lambda": lambda opt: SCHEDULERS.LambdaLR(opt, lambda i: 1 / (1 + i)),
    "recursive": lambda opt: SCHEDULERS.ExponentialLR(opt, 0.5),
    "one cycle": lambda opt: SCHEDULERS.OneCycleLR(opt, 4.0, total_steps=8),
    "sequence": lambda opt: SCHEDULERS.SequentialLR(
        opt, [SCHEDULERS.ConstantLR(opt, 0.5, 2), SCHEDULERS.LambdaLR(opt, lambda i: 1 / (1 + i))], [2]
    ),
}


@pytest.mark.parametrize("kind", FOLLOWING)
def test_a_rate_that_a_hook_sets_scales_the_schedule_also_in_a_resumed_run(kind, tmp_path, log):
    def halve(trainer):
        trainer.optimizer.param_groups[0]["lr"] *= 0.5

    make, change = FOLLOWING[kind], at(2, halve)
    plain, _ = train(make)
    changed, _ = train(make, change)
    assert changed == pytest.approx([*plain[:3], *(rate * 0.5 for rate in plain[3:])])
    assert log.text.count("learning rate was set to") == 1
    first, _ = train(make, change, folder=tmp_path, stop=3)
    assert first + train(make, change, folder=tmp_path, resume=True)[0] == changed


@pytest.mark.parametrize("kind", ["LRMultiplier", "lambda"])
def test_a_rate_that_a_script_sets_in_a_resumed_run_scales_the_schedule(kind, tmp_path):
    schedules = {**FOLLOWING, "LRMultiplier": lambda opt: LRMultiplier(opt, LinearParamScheduler(1.0, 0.3), 7)}
    plain, _ = train(make := schedules[kind])
    train(make, folder=tmp_path, stop=3)
    resumed, rates = small_trainer(), Rates()
    resumed.scheduler = make(resumed.optimizer)
    resumed.register_hooks([LRScheduler(scheduler=resumed.scheduler), rates])
    Checkpointer(resumed.model, str(tmp_path), trainer=resumed).resume_or_load("", resume=True)
    resumed.optimizer.param_groups[0]["lr"] *= 0.5
    resumed.train(3, 7)
    assert rates.used == pytest.approx([rate * 0.5 for rate in plain[3:]])


def test_a_rate_set_before_the_first_step_is_the_base_of_the_schedule():
    trainer = small_trainer(LRScheduler(), rates := Rates())
    trainer.scheduler = SCHEDULERS.LambdaLR(trainer.optimizer, lambda i: min(1.0, (1 + i) / 4))
    trainer.optimizer.param_groups[0]["lr"] = 0.4
    trainer.train(0, 5)
    assert rates.used == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_the_rate_in_a_state_of_the_optimizer_that_a_script_loads_does_not_change_the_schedule(log):
    state = small_trainer().optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.0  # as at the end of a run

    def load(trainer):
        trainer.optimizer.load_state_dict(state)

    trainer = small_trainer(LRScheduler(), rates := Rates(), at(2, load))
    trainer.scheduler = LRMultiplier(trainer.optimizer, LinearParamScheduler(1.0, 0.0), 5)
    load(trainer)
    trainer.train(0, 5)
    assert rates.used == pytest.approx([1.0, 0.8, 0.6, 0.0, 0.2])  # a hook's counts for one step, as in detectron2
    assert "The learning rate 0 of the optimizer's loaded state is now the schedule's, 1" in log.text


def test_by_default_the_schedule_is_that_of_the_trainer_also_of_a_second_one():
    hook = LRScheduler()
    for _ in range(2):
        trainer = small_trainer(rates := Rates())
        trainer.scheduler = SCHEDULERS.StepLR(trainer.optimizer, 1, gamma=0.5)
        trainer.register_hooks([hook])
        trainer.train(0, 3)
        assert rates.used == [1.0, 0.5, 0.25]


LOSSES = [5.0, 6.0, 4.0, 4.5, 4.2, 9.0]


def train_by_metric(values, metric="test/loss", **options):
    """Evaluate after every second step, with ``values`` in turn; halve the rate when the loss grows."""
    evaluations = iter(values)
    other = EvalHook(1, lambda: {"other": {"loss": 1.0}})
    evaluate = EvalHook(2, lambda: {"test": {"loss": next(evaluations)}}, eval_after_train=False)
    plateau = functools.partial(SCHEDULERS.ReduceLROnPlateau, factor=0.5, patience=0)
    return train(plateau, other, evaluate, metric=metric, end=12, **options)


def test_reduce_on_plateau_is_stepped_once_after_each_evaluation_with_the_metric():
    used, trainer = train_by_metric(LOSSES)
    assert used == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    assert [value for value, _ in trainer.storage.history("lr").values()] == used
    assert trainer.scheduler.last_epoch == len(LOSSES)


@pytest.mark.parametrize("stop", [3, 4])
def test_a_resumed_plateau_continues(tmp_path, stop):
    """Other evaluations see the value from before the resume."""
    whole, _ = train_by_metric(LOSSES)
    first, trainer = train_by_metric(LOSSES, folder=tmp_path, stop=stop)
    second, trainer = train_by_metric(LOSSES[trainer.scheduler.last_epoch :], folder=tmp_path, resume=True)
    assert first + second == whole
    assert trainer.scheduler.last_epoch == len(LOSSES)


def test_wrong_metrics_and_a_scheduler_stepped_twice_are_errors_before_training():
    with pytest.raises(ConfigError, match=r"SOLVER\.LR_SCHEDULER_METRIC"):
        train_by_metric(LOSSES, metric=None)
    for arguments, message in (([{"metric": "test/loss"}], "ReduceLROnPlateau"), ([{}, {}], "twice as fast")):
        trainer = small_trainer()
        scheduler = SCHEDULERS.StepLR(trainer.optimizer, 1)
        trainer.register_hooks([LRScheduler(scheduler=scheduler, **one) for one in arguments])
        with pytest.raises(ConfigError, match=message):
            trainer.train(0, 1)
