"""Trainers whose own loop calls the methods around a step, in whichever way."""

import pytest
import torch
from torch import nn

from hookline.engine import SimpleTrainer
from hookline.hooks import EventStorage, HookBase


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x):
        return {"loss": self.fc(x).pow(2).mean()}


class Recorder(HookBase):
    def __init__(self):
        self.seen = []

    def before_train(self):
        self.seen.append("begin")

    def after_step(self):
        self.seen.append(self.trainer.iter)

    def after_epoch(self):
        self.seen.append("epoch")

    def after_run(self):
        self.seen.append("end")


class Loop(SimpleTrainer):
    def __init__(self):
        model = Net()
        super().__init__(model, [torch.ones(2, 3)] * 2, torch.optim.SGD(model.parameters(), 0.1))
        self.max_iter = 4
        self.recorder = Recorder()
        self.register_hooks([self.recorder])

    def train(self):
        with EventStorage(self.start_iter) as self.storage:
            self.before_train()
            for self.iter in range(self.start_iter, self.max_iter):  # noqa: B020
                self.before_step()
                self.run_step()
                self.after_step()
            self.after_train()


class CallsParents(Loop):
    def train(self):
        with EventStorage(self.start_iter) as self.storage:
            super().before_train()
            for self.iter in range(self.start_iter, self.max_iter):  # noqa: B020
                super().before_step()
                self.run_step()
                super().after_step()
            super().after_train()


class OverridesBeforeTrain(Loop):
    def before_train(self):
        self.prepared = True


class WithoutBeforeTrain(Loop):
    def train(self):
        with EventStorage(self.start_iter) as self.storage:
            for self.iter in range(self.start_iter, self.max_iter):  # noqa: B020
                self.before_step()
                self.run_step()
                self.after_step()
            self.after_train()


class CallsItsHooksItself(Loop):
    def after_step(self):
        for hook in self._hooks:
            hook.after_step()


class CallsAllHooksItself(CallsItsHooksItself):
    def before_step(self):
        for hook in self._hooks:
            hook.before_step()

    def after_train(self):
        for hook in self._hooks:
            hook.after_train()


@pytest.mark.parametrize(
    "loop",
    [Loop, CallsParents, OverridesBeforeTrain, WithoutBeforeTrain, CallsItsHooksItself, CallsAllHooksItself],
    ids=lambda loop: loop.__name__,
)
def test_steps_and_epochs_are_counted(loop):
    trainer = loop()
    trainer.train()
    seen = [event for event in trainer.recorder.seen if event != "begin"]
    assert seen == [0, 1, "epoch", 2, 3, "epoch", "end"]
    assert trainer.finished_iter == 3
    assert trainer.completed
    assert trainer.storage.latest()["total_loss"][1] == 3


def test_a_loop_that_died_is_begun_again():
    trainer = Loop()
    trainer.run_step, died = lambda: 1 / 0, trainer.run_step
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.run_step = died
    SimpleTrainer.train(trainer, 0, 4)
    assert trainer.recorder.seen[-7:] == [0, 1, "epoch", 2, 3, "epoch", "end"]
    assert trainer.finished_iter == 3


class LeavesAStep(Loop):
    def train(self):
        with EventStorage(self.start_iter) as self.storage:
            self.before_train()
            for self.iter in range(self.start_iter, self.max_iter):  # noqa: B020
                self.before_step()
                if self.iter == self.left_at:
                    break
                self.run_step()
                self.after_step()
            self.after_train()


class LeavesAStepOfItsOwn(LeavesAStep):
    def after_step(self):
        super().after_step()


@pytest.mark.parametrize(
    ("loop", "left_at"), [(LeavesAStep, 0), (LeavesAStep, 2), (LeavesAStepOfItsOwn, 2)], ids=lambda value: str(value)
)
def test_a_step_that_was_left_is_not_counted(loop, left_at):
    trainer = loop()
    trainer.left_at = left_at
    trainer.train()
    assert trainer.finished_iter == left_at - 1
    assert trainer.state_dict()["iteration"] == left_at - 1
