import os
import signal
import threading

import pytest
import torch
from torch import nn

from hookline.engine import SimpleTrainer, TrainerBase
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import HookBase, PeriodicCheckpointer, SignalHandler


class Counting(TrainerBase):
    """Sends itself a signal while a step is running."""

    def __init__(self, signals):
        super().__init__()
        self.signals = signals
        self.steps = 0

    def run_step(self):
        for number in self.signals.get(self.iter, ()):
            os.kill(os.getpid(), number)
        self.steps += 1


class Ended(HookBase):
    ended = 0

    def after_train(self):
        self.ended += 1


@pytest.fixture(autouse=True)
def handlers_are_put_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_in_good_order_after_the_present_step(number):
    trainer, ended = Counting({3: [number]}), Ended()
    trainer.register_hooks([SignalHandler(), ended])
    result = trainer.train(0, 10)
    assert trainer.steps == 4
    assert result.iteration == 4
    assert result.reason == f"interrupted by {number.name}"
    assert ended.ended == 1


def test_a_second_ctrl_c_ends_the_run_at_once():
    trainer, ended = Counting({3: [signal.SIGINT, signal.SIGINT]}), Ended()
    trainer.register_hooks([SignalHandler(), ended])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(0, 10)
    assert trainer.steps == 3
    assert ended.ended == 1


def test_a_second_sigterm_does_no_harm():
    trainer = Counting({3: [signal.SIGTERM, signal.SIGTERM]})
    trainer.register_hooks([SignalHandler()])
    assert trainer.train(0, 10).iteration == 4


def test_a_stopped_run_can_be_trained_further():
    trainer = Counting({3: [signal.SIGINT]})
    trainer.register_hooks([SignalHandler()])
    assert trainer.train(0, 10).iteration == 4
    assert trainer.train(4, 10).reason == "completed"
    assert trainer.steps == 10


def test_an_interrupted_run_leaves_a_checkpoint_to_resume_from(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x):
            return self.fc(x).mean()

    class Interrupt(HookBase):
        def before_step(self):
            if self.trainer.iter == 4:
                os.kill(os.getpid(), signal.SIGINT)

    def make():
        model = Net()
        trainer = SimpleTrainer(model, [torch.ones(1, 2)], torch.optim.SGD(model.parameters(), 0.1))
        return trainer, Checkpointer(model, str(tmp_path), trainer=trainer)

    trainer, checkpointer = make()
    trainer.register_hooks([SignalHandler(), Interrupt(), PeriodicCheckpointer(checkpointer, 1000)])
    trainer.train(0, 10)
    again, checkpointer = make()
    checkpointer.resume_or_load("", resume=True)
    assert again.iter == 4
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])


def test_outside_of_the_main_thread_signals_are_left_alone():
    trainer = Counting({})
    trainer.register_hooks([SignalHandler()])
    results = []
    thread = threading.Thread(target=lambda: results.append(trainer.train(0, 3)))
    thread.start()
    thread.join()
    assert results[0].reason == "completed"
