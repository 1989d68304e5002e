import pytest
import torch
from fvcore.common.param_scheduler import LinearParamScheduler, StepParamScheduler
from small_runs import Net
from torch import nn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import EvalHook, HookBase, LRScheduler


def make_trainer(lr=1.0, param_groups=None):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(param_groups(model) if param_groups else model.parameters(), lr=lr)
    return SimpleTrainer(model, [torch.ones(1, 2)], optimizer)


class Rates(HookBase):
    """The learning rate of each update."""

    def __init__(self):
        self.used = []

    def before_optimizer_step(self):
        self.used.append(self.trainer.optimizer.param_groups[0]["lr"])


def test_puts_the_rate_of_the_step_and_sets_the_next_one():
    trainer, rates = make_trainer(), Rates()
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, step_size=3, gamma=0.1)
    trainer.register_hooks([LRScheduler(scheduler=scheduler), rates])
    trainer.train(0, 7)
    assert rates.used == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01])
    assert [value for value, _ in trainer.storage.history("lr").values()] == rates.used
    assert trainer.storage.smoothing_hints()["lr"] is False
    assert scheduler.last_epoch == 7


def test_by_default_the_trainers_scheduler_is_stepped():
    trainer = make_trainer()
    trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    trainer.register_hooks([LRScheduler()])
    trainer.train(0, 5)
    assert trainer.scheduler.last_epoch == 5


def test_a_param_scheduler_multiplies_the_base_rate_over_the_whole_run():
    trainer, rates = make_trainer(lr=2.0), Rates()
    trainer.register_hooks([LRScheduler(scheduler=LinearParamScheduler(1.0, 0.0)), rates])
    trainer.train(0, 4)
    assert rates.used == pytest.approx([2.0, 1.5, 1.0, 0.5])


def test_two_hooks_with_one_scheduler_are_rejected():
    trainer = make_trainer()
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    trainer.register_hooks([LRScheduler(scheduler=scheduler), LRScheduler(scheduler=scheduler)])
    with pytest.raises(ConfigError, match="twice as fast"):
        trainer.train(0, 1)


def test_a_param_scheduler_defined_below_one_lasts_until_the_last_step():
    trainer, rates = make_trainer(), Rates()
    trainer.register_hooks([LRScheduler(scheduler=StepParamScheduler(4, [1.0, 0.1])), rates])
    trainer.train(0, 4)
    assert rates.used == pytest.approx([1.0, 1.0, 0.1, 0.1])


@pytest.mark.parametrize("make", [lambda opt: LinearParamScheduler(1.0, 0.0), lambda opt: _step_lr(opt)])
def test_a_resumed_schedule_continues(tmp_path, make):
    def run(start, stop, load=None):
        trainer, rates = make_trainer(lr=0.1), Rates()
        trainer.register_hooks([LRScheduler(scheduler=make(trainer.optimizer)), rates])
        checkpointer = Checkpointer(trainer.model, str(tmp_path), trainer=trainer)
        if load:
            checkpointer.load(load)
            assert trainer.iter + 1 == start

        class StopAt(HookBase):
            def after_step(self):
                if self.trainer.iter + 1 == stop:
                    self.trainer.request_save()

            def on_save(self):
                checkpointer.save(f"at_{stop}")
                self.trainer.request_stop("enough")

        trainer.register_hooks([StopAt()])
        trainer.train(start, 10)
        return rates.used

    whole = run(0, 10)
    assert run(0, 4) + run(4, 10, load=str(tmp_path / "at_4.pth")) == pytest.approx(whole, rel=1e-12)
    assert len(set(whole)) > 2


def _step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def test_reports_the_rate_of_the_group_with_most_parameters():
    trainer = make_trainer(
        param_groups=lambda model: [
            {"params": [model.fc.bias], "lr": 5.0},
            {"params": [model.fc.weight, nn.Parameter(torch.zeros(1))], "lr": 1.0},
        ]
    )
    trainer.register_hooks([LRScheduler(scheduler=_step_lr(trainer.optimizer))])
    trainer.train(0, 1)
    assert trainer.storage.latest()["lr"][0] == 1.0


def test_with_one_parameter_per_group_reports_the_most_common_rate():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(parameters, (9.0, 1.0, 1.0), strict=True)])
    assert LRScheduler.get_best_param_group_id(optimizer) == 1


# ---------------------------------------------------------------------- by a metric

PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


def train_by_metric(values, stop=12, tmp_path=None, load=None, hooks=(), **args):
    """Evaluate after every second step, with ``values`` in turn; halve the rate when the loss grows."""
    trainer, rates = make_trainer(), Rates()
    trainer.scheduler = PLATEAU(trainer.optimizer, factor=0.5, patience=0)
    evaluations = iter(values)
    checkpointer = Checkpointer(trainer.model, str(tmp_path), trainer=trainer) if tmp_path else None
    trainer.register_hooks([LRScheduler(**args), rates, *hooks])
    if stop < 12:

        class Stops(HookBase):
            def after_step(self):
                if self.trainer.iter + 1 == stop:
                    self.trainer.request_save()

            def on_save(self):
                checkpointer.save("model", optimizer=self.trainer.optimizer.state_dict())
                self.trainer.request_stop("enough")

        trainer.register_hooks([Stops()])
    trainer.register_hooks([EvalHook(2, lambda: {"test": {"loss": next(evaluations)}})])
    start = 0
    if load:
        trainer.optimizer.load_state_dict(checkpointer.load(load)["optimizer"])
        start = trainer.iter + 1
    trainer.train(start, 12)
    return rates.used, trainer


LOSSES = [5.0, 6.0, 4.0, 4.5, 4.2, 9.0]


def test_reduce_on_plateau_is_stepped_once_after_each_evaluation():
    used, trainer = train_by_metric(LOSSES, metric="test/loss")
    assert used == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    assert [value for value, _ in trainer.storage.history("lr").values()] == used
    assert trainer.scheduler.last_epoch == len(LOSSES)


def test_reduce_on_plateau_ignores_evaluations_without_its_metric():
    others = EvalHook(1, lambda: {"other": {"loss": 1.0}})
    used, trainer = train_by_metric(LOSSES, metric="test/loss", hooks=[others])
    assert used == train_by_metric(LOSSES, metric="test/loss")[0]
    assert trainer.scheduler.last_epoch == len(LOSSES)


@pytest.mark.parametrize("stop", [3, 4, 5, 7, 9])
def test_a_resumed_plateau_continues(tmp_path, stop):
    whole, _ = train_by_metric(LOSSES, metric="test/loss")
    others = [EvalHook(1, lambda: {"other": {"loss": 1.0}})]  # sees the value from before the resume
    first, trainer = train_by_metric(LOSSES, stop, tmp_path, metric="test/loss", hooks=others)
    done = trainer.scheduler.last_epoch
    second, trainer = train_by_metric(
        LOSSES[done:], tmp_path=tmp_path, load=str(tmp_path / "model.pth"), metric="test/loss", hooks=others
    )
    assert first + second == whole
    assert trainer.scheduler.last_epoch == len(LOSSES)


def test_a_second_run_uses_its_own_evaluations():
    trainer = make_trainer()
    trainer.scheduler = PLATEAU(trainer.optimizer, factor=0.5, patience=0)
    trainer.register_hooks([LRScheduler(metric="loss"), EvalHook(0, lambda: {"loss": 1.0})])
    for runs in (1, 2, 3):
        trainer.train(0, 4)
        assert trainer.scheduler.last_epoch == runs
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25


def test_a_missing_metric_is_logged_once_with_the_nearest_name(caplog):
    train_by_metric(LOSSES, metric="test/los")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "needs 'test/los'" in warnings[0]
    assert "did you mean 'test/loss'" in warnings[0]


def test_reduce_on_plateau_without_a_metric_fails_before_training():
    with pytest.raises(ConfigError, match=r"metric=.*SOLVER\.LR_SCHEDULER_METRIC"):
        train_by_metric(LOSSES)


@pytest.mark.parametrize("make", [_step_lr, lambda optimizer: LinearParamScheduler(1.0, 0.0)])
def test_a_metric_for_another_scheduler_is_rejected(make):
    trainer = make_trainer()
    trainer.register_hooks([LRScheduler(scheduler=make(trainer.optimizer), metric="test/loss")])
    with pytest.raises(ConfigError, match="is for ReduceLROnPlateau"):
        trainer.train(0, 1)


# ---------------------------------------------------------------------- several optimizers


def make_two():
    model = Net()
    optimizers = [torch.optim.SGD([model.fc.weight], lr=1.0), torch.optim.SGD([model.fc.bias], lr=0.1)]
    return SimpleTrainer(model, [torch.ones(1, 2)], optimizers), optimizers


def test_one_param_scheduler_for_several_optimizers_is_rejected():
    trainer, _ = make_two()
    trainer.register_hooks([LRScheduler(scheduler=LinearParamScheduler(1.0, 0.0))])
    with pytest.raises(ConfigError, match="register one LRScheduler each"):
        trainer.train(0, 4)


def test_several_optimizers_can_have_a_param_scheduler_each():
    trainer, optimizers = make_two()
    for name, optimizer in zip(("lr_a", "lr_b"), optimizers, strict=True):
        trainer.register_hooks([LRScheduler(optimizer, LinearParamScheduler(1.0, 0.0), name=name)])
    trainer.train(0, 4)
    assert trainer.storage.latest()["lr_a"][0] == pytest.approx(0.25)
    assert trainer.storage.latest()["lr_b"][0] == pytest.approx(0.025)


class TimmLike:
    """A scheduler with the interface of timm's: it is told the numbers of epochs and updates."""

    def __init__(self, optimizer, t_in_epochs):
        self.optimizer, self.t_in_epochs, self.calls = optimizer, t_in_epochs, []

    def step(self, epoch, metric=None):
        self.calls.append(("epoch", epoch))
        self._set(epoch, self.t_in_epochs)

    def step_update(self, num_updates, metric=None):
        self.calls.append(("update", num_updates))
        self._set(num_updates, not self.t_in_epochs)

    def _set(self, t, counts):
        if counts:
            self.optimizer.param_groups[0]["lr"] = 1 / (1 + t)

    def state_dict(self):
        return {"calls": list(self.calls)}

    def load_state_dict(self, state_dict):
        self.calls = list(state_dict["calls"])


def make_epochs(length=3):
    torch.manual_seed(0)
    model = Net()
    return SimpleTrainer(model, [torch.ones(1, 2)] * length, torch.optim.SGD(model.parameters(), lr=1.0))


def test_a_torch_scheduler_can_count_epochs():
    trainer, rates = make_epochs(3), Rates()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    trainer.register_hooks([LRScheduler(scheduler=scheduler, interval="epoch"), rates])
    trainer.train(0, 8)
    assert rates.used == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_a_torch_scheduler_can_count_evaluations():
    trainer, rates = make_epochs(3), Rates()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    trainer.evaluate = lambda: None
    hooks = [LRScheduler(scheduler=scheduler, interval="evaluation"), EvalHook(2, lambda: {"x": 1.0}), rates]
    trainer.register_hooks(hooks)
    trainer.train(0, 5)
    assert rates.used == [1, 1, 0.5, 0.5, 0.25]
    assert scheduler.last_epoch == 2  # the evaluation after the last step has nothing to change


@pytest.mark.parametrize("in_epochs", [True, False])
def test_a_timm_scheduler_is_told_epochs_and_updates(in_epochs):
    trainer, rates = make_epochs(3), Rates()
    scheduler = TimmLike(trainer.optimizer, in_epochs)
    trainer.register_hooks([LRScheduler(scheduler=scheduler), rates])
    trainer.train(0, 4)
    assert scheduler.calls == [("update", 1), ("update", 2), ("update", 3), ("epoch", 1), ("update", 4)]
    assert rates.used == pytest.approx([1, 1, 1, 1 / 2] if in_epochs else [1, 1 / 2, 1 / 3, 1 / 4])


@pytest.mark.parametrize("kind", ["epoch", "timm epochs", "timm updates"])
def test_schedules_of_epochs_resume_exactly(kind, tmp_path):
    def run(start, end, folder, resume=False):
        trainer, rates = make_epochs(3), Rates()
        if kind == "epoch":
            scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
        else:
            scheduler = TimmLike(trainer.optimizer, kind == "timm epochs")
        trainer.register_hooks(
            [LRScheduler(scheduler=scheduler, interval="epoch" if kind == "epoch" else "iteration"), rates]
        )
        checkpointer = Checkpointer(trainer.model, str(folder), trainer=trainer)
        if resume:
            checkpointer.resume_or_load("", resume=True)
        trainer.train(start, end)
        checkpointer.save("model_last")
        return rates.used, trainer.model.state_dict()["fc.weight"]

    rates, weight = run(0, 11, tmp_path / "whole")
    first, _ = run(0, 6, tmp_path / "parts")
    second, resumed = run(6, 11, tmp_path / "parts", resume=True)
    assert first + second == rates
    assert torch.equal(weight, resumed)


def test_timms_own_schedulers(tmp_path):
    timm = pytest.importorskip("timm.scheduler", exc_type=ImportError)
    trainer, rates = make_epochs(3), Rates()
    scheduler = timm.CosineLRScheduler(trainer.optimizer, t_initial=4, warmup_t=1, warmup_lr_init=0.1)
    trainer.register_hooks([LRScheduler(scheduler=scheduler), rates])
    trainer.train(0, 12)
    epochs = [0.1, *(scheduler._get_lr(t)[0] for t in (1, 2, 3))]
    assert rates.used == pytest.approx([rate for rate in epochs for _ in range(3)])


def test_a_subclass_reads_the_rate_as_in_detectron2():
    class Own(LRScheduler):
        def after_step(self):
            rate = self._optimizer.param_groups[self._best_param_group_id]["lr"]
            self.trainer.storage.put_scalar("rate", rate, smoothing_hint=False)
            self.scheduler.step()

    trainer = make_trainer()
    trainer.register_hooks([Own(scheduler=torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1))])
    trainer.train(0, 3)
    assert trainer.storage.history("rate").values()[-1][0] == pytest.approx(
        trainer.optimizer.param_groups[0]["lr"] * 10
    )


def test_a_schedule_of_the_trainer_in_two_trainers_one_after_the_other():
    hook = LRScheduler()
    for _ in range(2):
        trainer, rates = make_trainer(), Rates()
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.5)
        trainer.register_hooks([hook, rates])
        trainer.train(0, 3)
        assert rates.used == [1.0, 0.5, 0.25]
