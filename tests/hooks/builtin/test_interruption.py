import os
import signal
import time

import pytest
from forker import forker
from metric_runs import Losses, at
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import CallbackHook, EvalHook, PeriodicCheckpointer, SignalHandler, StopSignals, TimeLimit
from hookline.hooks.builtin.interruption import EXIT_RESUMABLE


def trainer_of(*hooks, signals=()):
    """A trainer to which signals are sent in its fourth step."""

    def send(trainer):
        for number in signals:
            os.kill(os.getpid(), number)

    trainer = Losses()
    trainer.register_hooks([SignalHandler(), at(3, send, "before_step"), *hooks])
    return trainer


@pytest.fixture(autouse=True)
def handlers_are_put_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize(
    ("numbers", "code"),
    [([signal.SIGINT], 130), ([signal.SIGTERM, signal.SIGTERM], 75), ([signal.SIGUSR1, signal.SIGINT], 75)],
)
def test_the_first_signal_stops_after_the_step_and_the_run_can_be_trained_further(numbers, code):
    trainer = trainer_of(signals=numbers)
    result = trainer.train(0, 10)
    assert (result.iteration, result.metrics["loss"]) == (4, 3.0)
    assert (result.reason, result.exit_code) == (f"interrupted by {numbers[0].name}", code)
    result = trainer.train(4, 10)
    assert (result.reason, result.iteration) == ("completed", 10)


def test_a_second_ctrl_c_stops_the_run_at_once():
    ended = []
    end = CallbackHook(after_train=lambda trainer: ended.append(trainer.finished_iter))
    with pytest.raises(KeyboardInterrupt):
        trainer_of(end, signals=[signal.SIGINT, signal.SIGINT]).train(0, 10)
    assert ended == [2]


def test_a_second_ctrl_c_while_the_run_ends_saves_nothing_more():
    saved = []
    again = CallbackHook(
        after_train=lambda trainer: os.kill(os.getpid(), signal.SIGINT),
        on_save=lambda trainer: saved.append(trainer.iter),
    )
    with pytest.raises(KeyboardInterrupt):
        trainer_of(again, signals=[signal.SIGINT]).train(0, 10)
    assert saved == [0, 1, 2, 3]  # in the steps


def test_a_removed_hook_and_a_failed_run_restore_the_signal_handlers():
    """The fixture checks them again."""
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    def change(trainer):
        handlers.append(signal.getsignal(signal.SIGTERM))
        trainer.remove_hook(SignalHandler)

    trainer_of(CallbackHook(after_step=change)).train(0, 3)
    assert handlers[0] != before
    assert handlers[1:] == [before, before]
    with pytest.raises(ZeroDivisionError):
        trainer_of(CallbackHook(after_train=lambda trainer: 1 / 0)).train(0, 3)


def test_a_custom_loop_can_use_stop_signals():
    with StopSignals() as stop:
        assert not stop.reason
        os.kill(os.getpid(), signal.SIGTERM)
    assert (stop.reason, stop.exit_code) == ("interrupted by SIGTERM", 75)


WORKERS = """
import multiprocessing, os, signal, time
from hookline.engine.data.workers import ignore_signals

def work():
    time.sleep(0.5)
    ignore_signals()
    time.sleep(100)

multiprocessing.get_context("fork").Process(target=work, daemon=True).start()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_exit_with_a_process_that_is_killed_before_they_look_after_it(tmp_path):
    (tmp_path / "script.py").write_text(WORKERS)
    process = forker.start([tmp_path / "script.py"], tmp_path, os.environ)
    assert process.wait(50) == -9, process.communicate()
    end = time.monotonic() + 50
    while remaining := process.alive():
        assert time.monotonic() < end, remaining
        time.sleep(0.01)


AT_THE_END = """
import atexit, os, signal, sys
import torch
from torch import nn
from hookline import Trainer
from hookline.hooks import HookBase

def stop():
    os.kill(os.getpid(), signal.SIGTERM)
    print("stopped", flush=True)

class Loaded(HookBase):
    def after_load_best(self):
        loaded.append(1)

def metric(predictions, targets):
    if loaded:
        stop()
    return 1.0

loaded = []
atexit.register(stop)
x = torch.ones(8, 2)
options = {"CHECKPOINT.LOAD_BEST_AT_END": True, "CHECKPOINT.BEST.PERIOD": 1}
Trainer(
    nn.Linear(2, 1), (x, x[:, :1]), (x, x[:, :1]), loss=nn.MSELoss(), lr=0.1, length=4, batch_size=4, seed=1,
    metrics=[metric], monitor="total_loss", monitor_mode="max", output_dir="run", hooks=[Loaded()], config=options,
).train()
"""


def test_signals_after_a_complete_run_do_not_change_its_exit_code(tmp_path):
    (tmp_path / "script.py").write_text(AT_THE_END)
    process = forker.start([tmp_path / "script.py"], tmp_path, os.environ)
    code, output = process.wait(100), process.communicate()[0]
    assert (code, str(output).count("stopped")) == (0, 2)


def timed(clock, limit, *hooks):
    """A trainer whose steps take a second."""
    return trainer_of(limit, *hooks, CallbackHook(before_step=clock.takes(1)))


@pytest.mark.parametrize(
    ("arguments", "iteration"),
    [({"margin": 0}, 10), ({"margin": "3s"}, 7), ({}, 9), ({"margin": 0, "since": "process"}, 6)],
)
def test_training_stops_while_a_step_and_the_margin_still_fit(clock, monkeypatch, arguments, iteration):
    """A resumed run has the whole limit again."""
    monkeypatch.setattr("hookline.hooks.builtin.interruption._IMPORTED", clock.now - 4)
    trainer = timed(clock, TimeLimit("10s", **arguments))
    result = trainer.train(0, 100)
    assert (result.iteration, result.exit_code) == (iteration, EXIT_RESUMABLE)
    assert "10s" in result.reason
    if "since" not in arguments:
        assert trainer.train(iteration, 100).iteration == 2 * iteration


def test_time_is_left_for_an_evaluation_and_a_checkpoint(clock, tmp_path):
    checkpointer = Checkpointer(nn.Linear(1, 1), str(tmp_path))
    ends = []
    trainer = timed(
        clock,
        TimeLimit("40s", margin=0),
        EvalHook(5, clock.takes(6)),
        PeriodicCheckpointer(checkpointer, 5),
        CallbackHook(before_save=clock.takes(4), after_run=lambda trainer: ends.append(clock.now)),
    )
    # Steps 1 to 5, with both 15, to 10, 30: at 31 another such step and a checkpoint would end at 46.
    assert trainer.train(0, 100).iteration == 11
    assert ends == [1000 + 35]


@pytest.mark.parametrize(
    "arguments",
    [{"limit": 100}, {"limit": "2ep"}, {"limit": 0}, {"limit": "10s", "margin": "10s"}, {"limit": "1s", "since": "x"}],
)
def test_an_invalid_limit_raises_an_error(arguments):
    with pytest.raises(ConfigError, match=r"time|limit|since"):
        TimeLimit(**arguments)
