"""Trainers whose own loop calls the methods around a step, in whichever way."""

import pytest
import torch
from small_runs import Net

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.hooks import CallbackHook, EventStorage


class Loop(SimpleTrainer):
    calls_before_train = True

    def __init__(self, **attributes):
        model = Net()
        super().__init__(model, [torch.ones(2, 2)] * 2, torch.optim.SGD(model.parameters(), 0.1))
        self.max_iter, self.seen = 4, []
        note = CallbackHook(
            after_step=lambda trainer: self.seen.append(trainer.iter),
            after_epoch=lambda trainer: self.seen.append("epoch"),
            after_run=lambda trainer: self.seen.append("end"),
        )
        self.register_hooks([note])
        vars(self).update(attributes)

    def train(self):
        with EventStorage(self.start_iter) as self.storage:
            if self.calls_before_train:
                self.before_train()
            for self.iter in range(self.start_iter, self.max_iter):  # noqa: B020
                self.one_step()
            self.after_train()

    def one_step(self):
        self.before_step()
        self.run_step()
        self.after_step()


@pytest.mark.parametrize(
    "make",
    [Loop, lambda: Loop(calls_before_train=False), lambda: Loop(before_train=lambda: None)],
    ids=["own loop", "without before_train", "overrides before_train"],
)
def test_steps_and_epochs_are_counted(make):
    trainer = make()
    trainer.train()
    assert trainer.seen == [0, 1, "epoch", 2, 3, "epoch", "end"]
    assert trainer.finished_iter == 3
    assert trainer.completed
    assert trainer.storage.latest()["total_loss"][1] == 3


def test_a_loop_that_catches_the_error_of_a_step_leaves_the_step_out():
    class Catches(Loop):
        def one_step(self):
            self.before_step()
            try:
                _ = 1 / (self.iter - 1)
                self.run_step()
            except ZeroDivisionError:
                return
            self.after_step()

    trainer = Catches()
    trainer.train()
    assert [step for step in trainer.seen if step != "epoch"] == [0, 2, 3, "end"]
    assert not trainer.failed
    assert trainer.completed


def test_a_loop_that_never_ends_the_run_is_an_error_at_the_next_train():
    trainer = Loop(after_train=lambda: None)
    trainer.train()
    with pytest.raises(RuntimeError, match=r"did not call after_train\(\)"):
        trainer.train()


@pytest.mark.parametrize(("method", "match"), [("after_step", r"Own\.after_step\(\)"), ("before_step", "Own")])
def test_a_step_that_cannot_be_counted_is_an_error(method, match):
    calls_hooks = {method: lambda self: [getattr(hook, method)() for hook in self._hooks] and None}
    with pytest.raises(ConfigError, match=match):
        type("Own", (Loop,), calls_hooks)().train()
