import pytest
import torch
from fvcore.common.param_scheduler import LinearParamScheduler, StepParamScheduler
from torch import nn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import HookBase, LRScheduler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x):
        return {"loss": self.fc(x).pow(2).mean()}


def make_trainer(lr=1.0, param_groups=None):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(param_groups(model) if param_groups else model.parameters(), lr=lr)
    return SimpleTrainer(model, [torch.ones(1, 2)], optimizer)


class Rates(HookBase):
    """The rate each update is made with."""

    def __init__(self):
        self.used = []

    def before_optimizer_step(self):
        self.used.append(self.trainer.optimizer.param_groups[0]["lr"])


def test_the_rate_a_step_used_is_put_and_the_next_one_set():
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


def test_two_hooks_on_one_scheduler_are_refused():
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
def test_a_resumed_schedule_goes_on_where_it_was(tmp_path, make):
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


def test_the_rate_shown_is_that_of_the_group_with_most_parameters():
    trainer = make_trainer(
        param_groups=lambda model: [
            {"params": [model.fc.bias], "lr": 5.0},
            {"params": [model.fc.weight, nn.Parameter(torch.zeros(1))], "lr": 1.0},
        ]
    )
    trainer.register_hooks([LRScheduler(scheduler=_step_lr(trainer.optimizer))])
    trainer.train(0, 1)
    assert trainer.storage.latest()["lr"][0] == 1.0


def test_with_one_parameter_a_group_the_rate_shown_is_the_most_common_one():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(parameters, (9.0, 1.0, 1.0), strict=True)])
    assert LRScheduler.get_best_param_group_id(optimizer) == 1
