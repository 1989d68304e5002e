import os
import signal
import threading
import time

import pytest
import torch
from forker import forker
from torch import nn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer, TrainerBase
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import CallbackHook, EvalHook, HookBase, PeriodicCheckpointer, SignalHandler, StopSignals, TimeLimit
from hookline.hooks.control.interruption import EXIT_AGAIN, _process_start


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
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_a_signal_stops_the_run_after_the_current_step(number, code):
    trainer, ended = Counting({3: [number]}), Ended()
    trainer.register_hooks([SignalHandler(), ended])
    result = trainer.train(0, 10)
    assert trainer.steps == 4
    assert result.iteration == 4
    assert result.reason == f"interrupted by {number.name}"
    assert result.exit_code == code
    assert ended.ended == 1


def test_the_first_signal_determines_reason_and_exit_code():
    trainer = Counting({3: [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]})
    trainer.register_hooks([SignalHandler()])
    result = trainer.train(0, 10)
    assert (result.reason, result.exit_code, result.iteration) == ("interrupted by SIGUSR1", 75, 4)


def test_a_signal_in_the_last_step_has_no_effect():
    trainer = Counting({9: [signal.SIGTERM]})
    seen = []
    note = CallbackHook(after_train=lambda trainer: seen.append((trainer.interrupted, trainer.completed)))
    trainer.register_hooks([SignalHandler(), note])
    result = trainer.train(0, 10)
    assert (result.reason, result.exit_code, result.iteration) == ("completed", 0, 10)
    assert seen == [(False, True)]


def test_signals_are_caught_until_the_last_checkpoint_is_written():
    def send(trainer):
        os.kill(os.getpid(), signal.SIGTERM)  # would end this process if the old handler were restored

    trainer = Counting({})
    trainer.register_hooks([SignalHandler(), CallbackHook(after_train=send, on_write=send, after_run=None)])
    assert trainer.train(0, 3).reason == "completed"


def test_a_signal_before_the_first_step_trains_nothing_and_saves_nothing(tmp_path):
    model = nn.Linear(1, 1)
    trainer = Counting({})
    checkpointer = Checkpointer(model, str(tmp_path), trainer=trainer)
    send = CallbackHook(before_train=lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
    trainer.register_hooks([SignalHandler(), PeriodicCheckpointer(checkpointer, 1), send])
    result = trainer.train(0, 3)
    assert (result.iteration, result.exit_code, trainer.steps) == (0, 75, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_removed_handler_restores_the_signal_handlers():
    trainer = Counting({})
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    def change(trainer):
        handlers.append(signal.getsignal(signal.SIGTERM))
        trainer.remove_hook(SignalHandler)

    trainer.register_hooks([SignalHandler(), CallbackHook(after_step=change)])
    trainer.train(0, 3)
    assert handlers[0] != before
    assert handlers[1:] == [before, before]


def test_a_failed_run_restores_the_signal_handlers():
    def fail(trainer):
        raise RuntimeError("broken")

    trainer = Counting({})
    trainer.register_hooks([SignalHandler(), CallbackHook(after_train=fail)])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(0, 3)


def test_an_early_stop_is_not_an_interruption():
    trainer = Counting({})
    trainer.register_hooks([CallbackHook(after_step=lambda trainer: trainer.request_stop("good enough"))])
    result = trainer.train(0, 10)
    assert (result.reason, result.exit_code) == ("good enough", 0)


def test_a_custom_loop_can_use_stop_signals():
    done = 0
    with StopSignals() as stop:
        for iteration in range(10):
            if iteration == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            done += 1
            if stop.reason:
                break
    assert done == 4
    assert (stop.reason, stop.exit_code) == ("interrupted by SIGTERM", 75)


def test_a_second_ctrl_c_stops_the_run_at_once():
    trainer, ended = Counting({3: [signal.SIGINT, signal.SIGINT]}), Ended()
    trainer.register_hooks([SignalHandler(), ended])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(0, 10)
    assert trainer.steps == 3
    assert ended.ended == 1


def test_a_second_sigterm_is_ignored():
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


WORKERS = """
import multiprocessing, os, signal, sys, time
from hookline.hooks.control.interruption import StopSignals, leave_signals_to_parent

def work(ready, late):
    time.sleep(late)
    leave_signals_to_parent()
    ready.set()
    time.sleep(100)

def start(late=0.0):
    ready = multiprocessing.Event()
    multiprocessing.Process(target=work, args=(ready, late), daemon=True).start()
    return ready
"""


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("if os.fork():\n    os.wait()\nelse:\n    with StopSignals():\n        start().wait()\n        sys.exit()", 0),
        ("start().wait(); os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("start(0.5); os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
    ids=["of a process that was forked", "of one that is killed", "of one that is killed before they look after it"],
)
def test_workers_exit_with_the_process(code, exit_code, tmp_path):
    (tmp_path / "script.py").write_text(f"{WORKERS}\n{code}")
    process = forker.start([tmp_path / "script.py"], tmp_path, os.environ)
    assert process.wait(50) == exit_code, process.communicate()
    end = time.monotonic() + 50
    while remaining := process.alive():
        assert time.monotonic() < end, remaining
        time.sleep(0.01)


def test_signals_are_not_caught_outside_the_main_thread():
    trainer = Counting({})
    trainer.register_hooks([SignalHandler()])
    results = []
    thread = threading.Thread(target=lambda: results.append(trainer.train(0, 3)))
    thread.start()
    thread.join()
    assert results[0].reason == "completed"


# ---------------------------------------------------------------------------- TimeLimit


class Clock:
    """A clock that only the test advances."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("hookline.hooks.control.interruption.time.monotonic", lambda: self.now)

    def takes(self, seconds):
        def spend(*_):
            self.now += seconds

        return spend


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def timed(clock, limit, *hooks, step=1.0):
    trainer = Counting({})
    trainer.register_hooks([*hooks, CallbackHook(before_step=clock.takes(step)), limit])
    return trainer


def test_training_stops_while_a_step_still_fits(clock):
    result = timed(clock, TimeLimit("10s", margin=0)).train(0, 100)
    assert result.iteration == 10
    assert result.exit_code == EXIT_AGAIN
    assert result.reason == "the time limit of 10s is near"


def test_training_stops_before_the_margin(clock):
    assert timed(clock, TimeLimit("10s", margin="3s")).train(0, 100).iteration == 7


def test_the_default_margin_is_a_twentieth_of_the_limit_but_at_most_a_minute():
    assert TimeLimit("100s").margin == 5
    assert TimeLimit("10h").margin == 60


def test_a_run_that_ends_in_time_is_not_stopped(clock):
    result = timed(clock, TimeLimit("10s", margin=0)).train(0, 9)
    assert (result.reason, result.exit_code) == ("completed", 0)


def test_the_longest_step_counts_and_the_first_does_not(clock):
    slow = CallbackHook(before_step=lambda trainer: clock.takes({0: 20, 2: 4}.get(trainer.iter, 0))())
    # Steps end at 21, 22, 27, 28 ...: the end at 35 is the last that a step of 5 seconds may follow.
    assert timed(clock, TimeLimit("40s", margin=0), slow).train(0, 100).iteration == 12


def test_time_is_left_for_an_evaluation_and_a_checkpoint(clock, tmp_path):
    trainer = Counting({})
    checkpointer = Checkpointer(nn.Linear(1, 1), str(tmp_path), trainer=trainer)
    ends = []

    def evaluate():
        clock.now += 6

    trainer.register_hooks(
        [
            TimeLimit("40s", margin=0),
            EvalHook(5, evaluate),
            PeriodicCheckpointer(checkpointer, 5),
            CallbackHook(before_step=clock.takes(1), before_save=clock.takes(4)),
            CallbackHook(after_run=lambda trainer: ends.append(clock.now)),
        ]
    )
    result = trainer.train(0, 100)
    # Steps 1 to 5, with both 15, to 10, 30: at 30 another step, evaluation and checkpoint would end at 41.
    assert result.iteration == 11
    assert ends == [1000 + 35]


def test_a_resumed_run_has_the_whole_limit_again(clock):
    trainer = timed(clock, TimeLimit("10s", margin=0))
    assert trainer.train(0, 100).iteration == 10
    assert trainer.train(10, 100).iteration == 20


def test_since_process_counts_from_the_start_of_the_process(clock, monkeypatch):
    monkeypatch.setattr("hookline.hooks.control.interruption._process_start", lambda: clock.now - 4)
    assert timed(clock, TimeLimit("10s", margin=0, since="process")).train(0, 100).iteration == 6


def test_the_start_of_the_process_is_before_now_and_after_its_parents():
    age = time.monotonic() - _process_start()
    assert 0 < age < time.monotonic()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"limit": 100}, "100 is not a time"),
        ({"limit": "2ep"}, "'2ep' is not a time"),
        ({"limit": 0}, "not 0"),
        ({"limit": "10s", "margin": "10s"}, "not smaller than the limit"),
        ({"limit": "10s", "since": "boot"}, "since must be"),
    ],
)
def test_an_invalid_limit_raises_an_error(arguments, words):
    with pytest.raises(ConfigError, match=words):
        TimeLimit(**arguments)
