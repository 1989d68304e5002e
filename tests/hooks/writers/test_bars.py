import fcntl
import json
import logging
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from terminals import Terminal, screen
from torch import nn
from tqdm import tqdm

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer, TrainerBase, check_config
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.setup.logger import setup_logger
from hookline.hooks import (
    STEP_EVENTS,
    BestCheckpointer,
    CallbackHook,
    CommonMetricPrinter,
    EvalHook,
    IterationTimer,
    PeriodicWriter,
    ProgressBar,
    StopTraining,
)
from hookline.hooks.hook_list import overrides

ROOT = Path(__file__).parents[3]
COUNT = re.compile(r"\b\d+/\d+\b")


@pytest.fixture
def terminal(monkeypatch):
    with Terminal() as terminal:
        terminal.monkeypatch = monkeypatch
        yield terminal


@pytest.fixture(autouse=True)
def no_console(monkeypatch):
    """Restore the logger to its state before a run sets it up."""
    monkeypatch.setattr(logging.getLogger("hookline"), "handlers", [])


@pytest.fixture
def log(no_console):
    """Set up the logger as at the start of a run, with the current ``sys.stdout``."""
    return setup_logger


class Trainer(TrainerBase):
    """A trainer with empty steps, which a test makes wait for the terminal."""

    def run_step(self):
        self.storage.put_scalar("total_loss", 1 / (self.iter + 1))


def bar():
    return ProgressBar(refresh_per_second=500)


def shows(terminal, at, what):
    """A hook that waits until the terminal shows ``what`` in iteration ``at``."""

    def wait(trainer):
        if trainer.iter == at:
            terminal.until(what)

    return CallbackHook(before_step=wait)


def train(*hooks, start=0, end=10, trainer=None):
    trainer = trainer or Trainer()
    trainer.register_hooks(hooks)
    return trainer.train(start, end)


def bars(lines):
    return [line for line in lines if COUNT.search(line)]


def test_the_bar_shows_the_progress_and_stays_full_at_the_end(terminal):
    terminal.take_output()
    train(
        bar(),
        shows(terminal, 0, r"^  0%\| +\| 0/10 \[\? left, \?it/s\]$"),
        shows(terminal, 5, r"^ 50%\|█+▌? +\| 5/10 "),
        shows(terminal, 7, r"^ 70%\|█+.? +\| 7/10 \[00:\d\d left, +[\d.]+it/s\]$"),
    )
    terminal.close()
    *_, last, rest = terminal.screen()
    assert re.fullmatch(r"100%\|█+\| 10/10 \[00:00 left, +[\d.]+it/s\]", last)
    assert rest == ""
    assert sys.stdout is terminal.stream


class Rates(Trainer):
    def run_step(self):
        super().run_step()
        self.storage.put_scalars(time=0.1, data_time=0.02)
        self.storage.put_scalar("lr", 0.1 / (self.iter + 1), smoothing_hint=False)


def test_the_bar_shows_what_was_written(terminal):
    """The loss is the median of those written, so 0.4167 of 1, 1/2, 1/3 and 1/4."""
    terminal.take_output()
    train(
        bar(),
        PeriodicWriter([], period=4),
        shows(terminal, 3, r" 3/10 (?!.*loss)"),
        shows(terminal, 5, r" 5/10 .* loss 0.4167, lr 0.025, data 20%\]$"),
        shows(terminal, 9, r" 9/10 .* loss 0.225, lr 0.0125, data 20%\]$"),
        trainer=Rates(),
    )


def test_the_bar_shows_the_best_metric(terminal, tmp_path):
    def evaluate(trainer):
        trainer.storage.put_scalar("test/accuracy", 0.75, smoothing_hint=False)
        return {}

    trainer = Rates()
    best = BestCheckpointer(2, Checkpointer(nn.Linear(1, 1), str(tmp_path)), "test/accuracy")
    terminal.take_output()
    train(
        bar(), EvalHook(2, lambda: evaluate(trainer)), best, shows(terminal, 5, r" 5/10 .* best 0.75"), trainer=trainer
    )


def test_at_80_columns_the_bar_keeps_the_metrics(monkeypatch):
    with Terminal(80) as terminal:
        terminal.monkeypatch = monkeypatch
        terminal.take_output()
        train(
            bar(),
            PeriodicWriter([], period=4),
            shows(terminal, 1005, r"^100%.* 1005/1010 .* left, .* loss 0.0009\d+, lr 9.\d+e-05"),
            trainer=Rates(),
            start=1000,
            end=1010,
        )


def test_the_bar_shows_the_epoch_if_known(terminal):
    terminal.take_output()
    model = nn.Linear(1, 1)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = model

        def forward(self, batch):
            return {"loss": self.linear(batch).sum()}

    trainer = SimpleTrainer(Loss(), [torch.ones(1, 1)] * 4, torch.optim.SGD(model.parameters(), lr=0.1))
    train(
        bar(), shows(terminal, 1, "^epoch 1/3:   8%"), shows(terminal, 5, "^epoch 2/3:  42%"), trainer=trainer, end=12
    )
    terminal.close()
    assert terminal.screen()[-2].startswith("epoch 3/3: 100%")


def test_an_evaluation_outside_training_shows_no_bar():
    trainer = Trainer()
    trainer.register_hooks([bar()])
    for event in ("before_eval", "on_eval_end"):
        trainer.emit(event)


def test_the_bar_shows_evaluations(terminal):
    terminal.take_output()
    trainer = Trainer()

    def evaluate():
        terminal.until(r"^evaluating, batch 0:  40%.* 4/10 ")
        for _ in range(3):
            trainer.emit("after_eval_step", None, None)
        terminal.until(r"^evaluating, batch 3:  40%.* 4/10 ")
        return {}

    once = CallbackHook(after_step=lambda trainer: trainer.iter == 4 and trainer.request_eval())
    train(
        bar(),
        EvalHook(0, evaluate, eval_after_train=False),
        once,
        shows(terminal, 6, r"^ 60%.* 6/10 "),
        trainer=trainer,
    )


def test_a_resumed_run_starts_at_its_iteration_and_shows_its_own_speed(terminal):
    terminal.take_output()
    start = 10_000_000

    def watch(trainer):
        time.sleep(0.02)
        if trainer.iter == start:
            terminal.until(rf" {start}/{start + 10} \[")
        if trainer.iter == start + 8:
            terminal.until(rf" {start + 8}/{start + 10} .* [\d.]+it/s")

    train(bar(), CallbackHook(before_step=watch), start=start, end=start + 10)
    terminal.close()
    rates = re.findall(r"([\d.]+)it/s", re.sub(r"\x1b\[[0-9;]*m", "", terminal.text))
    assert rates
    assert all(float(rate) < 1000 for rate in rates)


def test_log_lines_and_prints_appear_above_the_bar_and_the_log_file_is_plain(terminal, log, tmp_path):
    terminal.take_output()
    logger = log(str(tmp_path))

    def say(trainer):
        terminal.until(rf" {trainer.iter}/10 ")
        print("printed at", trainer.iter)
        if trainer.iter == 5:
            logger.warning("careful")

    train(IterationTimer(), bar(), PeriodicWriter([CommonMetricPrinter(10)], 5), CallbackHook(before_step=say))
    terminal.close()
    lines = terminal.screen()
    assert [line for line in lines if line.startswith("printed")] == [f"printed at {number}" for number in range(10)]
    assert not any("iter:" in line for line in lines)  # the bar shows it
    assert re.search("\x1b\\[33m[\\d:]+  WARNING: careful\x1b\\[0m\r\n", terminal.text)
    assert len(bars(lines)) == 1
    text = (tmp_path / "log.txt").read_text()
    assert "careful" in text
    assert len(re.findall(r"eta: 0:00:00  iter: [49]/10  total_loss: ", text)) == 2
    assert "\x1b" not in text
    assert "█" not in text


def test_a_prompt_is_shown_on_a_line_of_its_own(terminal):
    def ask(trainer):
        if trainer.iter == 5:
            print("(Pdb) ", end="", flush=True)
            terminal.until(r"^\(Pdb\)\n")

    terminal.take_output()
    train(bar(), CallbackHook(before_step=ask))


@pytest.mark.parametrize("error", [ValueError("the real error"), KeyboardInterrupt()])
def test_a_failure_shows_the_full_traceback_and_restores_the_terminal(terminal, log, error):
    terminal.take_output()
    log()

    def fail(trainer):
        if trainer.iter == 4:
            terminal.until(" 4/10 ")
            raise error

    with pytest.raises(type(error)):
        train(bar(), CallbackHook(before_step=fail))
    assert sys.stdout is terminal.stream
    terminal.close()
    lines = terminal.screen()  # which has no escape codes to undo
    shown = [number for number, line in enumerate(lines) if "at iteration 4" in line]
    assert shown
    assert " 4/10 " in lines[-2]
    assert len(bars(lines)) == 1
    if isinstance(error, ValueError):
        assert "Traceback (most recent call last):" in lines[shown[0] + 1]
        assert "ValueError: the real error" in lines
        assert "    raise error" in lines


def test_after_a_stop_the_bar_shows_the_last_iteration(terminal):
    def stop(trainer):
        if trainer.iter == 3:
            raise StopTraining("enough")

    terminal.take_output()
    assert train(bar(), CallbackHook(after_step=stop)).reason == "enough"
    terminal.close()
    assert re.match(r" 40%\|█+.? +\| 4/10 ", terminal.screen()[-2])
    assert sys.stdout is terminal.stream


def test_a_trainer_within_another_run_shows_no_bar(terminal):
    def nested(trainer):
        if trainer.iter == 5:
            terminal.until(" 5/10 ")
            assert train(bar(), end=77).reason == "completed"

    terminal.take_output()
    train(bar(), CallbackHook(before_step=nested))
    assert sys.stdout is terminal.stream
    train(bar(), end=20)
    terminal.close()
    assert [COUNT.search(line)[0] for line in bars(terminal.screen())] == ["10/10", "20/20"]
    assert "/77" not in terminal.text


def test_two_bars_of_one_trainer_show_one(terminal):
    terminal.take_output()
    train(bar(), bar())
    terminal.close()
    assert len(bars(terminal.screen())) == 1


@pytest.mark.parametrize("columns", [8, 20, 30, 80, 300])
def test_the_bar_is_never_wider_than_the_terminal(columns, monkeypatch):
    with Terminal(columns) as terminal:
        terminal.monkeypatch = monkeypatch
        terminal.take_output()
        train(bar(), shows(terminal, 5, " ?50%"), start=0)
        terminal.close()
        lines = terminal.screen()
        assert len(lines) == 2
        assert lines[0].startswith("100%")
        assert len(lines[0]) <= columns


def test_the_bar_works_without_colors_and_unicode(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    with Terminal(80, encoding="ascii") as terminal:
        terminal.monkeypatch = monkeypatch
        terminal.take_output()
        train(bar(), shows(terminal, 5, r"^ 50%\|#+5? +\| 5/10 "))
        terminal.close()
        assert re.match(r"100%\|#{10,}\| 10/10", terminal.screen()[-2])
        assert not re.search(r"\x1b\[[0-9;]*3\dm", terminal.text)


def test_files_and_pipes_get_no_bar_in_any_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with open(tmp_path / "out", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        train(bar(), CallbackHook(before_step=lambda trainer: time.sleep(0.005)))
        assert sys.stdout is file
    assert (tmp_path / "out").read_text() == ""


def test_a_dumb_terminal_gets_no_bar(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal.take_output()
    train(bar(), CallbackHook(before_step=lambda trainer: time.sleep(0.005)))
    terminal.close()
    assert terminal.text == ""


def test_only_rank_0_shows_a_bar(terminal, monkeypatch):
    class Comm:
        is_main_process = staticmethod(lambda: False)

    trainer = Trainer()
    trainer.comm = Comm
    terminal.take_output()
    train(bar(), CallbackHook(before_step=lambda trainer: time.sleep(0.005)), trainer=trainer)
    terminal.close()
    assert terminal.text == ""


def test_a_logging_handler_that_holds_the_stream_writes_above_the_bar(terminal):
    terminal.take_output()
    handler = logging.StreamHandler(sys.stdout)
    logger = logging.getLogger("user.code")
    logger.addHandler(handler)
    try:
        train(
            bar(), shows(terminal, 3, " 3/10 "), CallbackHook(before_step=lambda t: t.iter == 3 and logger.error("bad"))
        )
        assert handler.stream is terminal.stream
    finally:
        logger.removeHandler(handler)
    terminal.close()
    assert "bad" in terminal.screen()
    assert len(bars(terminal.screen())) == 1


def test_a_process_forked_while_the_bar_is_drawn_can_print(terminal):
    def fork(trainer):
        if trainer.iter == 3:
            with tqdm.get_lock():
                pid = os.fork()
                if not pid:
                    print("printed by the child")
                    sys.stdout.flush()
                    os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0

    terminal.take_output()
    train(bar(), CallbackHook(before_step=fork))
    terminal.close()
    assert "printed by the child\r\n" in terminal.text


def test_a_step_takes_no_time_for_the_bar():
    assert not [event for event in ("before_step", "after_step", *STEP_EVENTS) if overrides(bar(), event)]


def config(*opts):
    cfg = get_cfg()
    cfg.merge_from_file(str(ROOT / "configs/synthetic/mlp.yaml"))
    cfg.merge_from_list(list(opts))
    return cfg


@pytest.mark.parametrize("there", [True, False])
def test_the_config_turns_the_bar_on_or_off(there, tmp_path):
    trainer = DefaultTrainer(config("LOG.PROGRESS_BAR", str(there), "OUTPUT_DIR", str(tmp_path)))
    assert (trainer.find_hook(ProgressBar) is not None) == there


def test_invalid_values_are_refused():
    with pytest.raises(ConfigError, match=r"LOG\.PROGRESS_BAR.*sometimes"):
        config("LOG.PROGRESS_BAR", "sometimes")
    with pytest.raises(ConfigError, match=r"HOOKS\[0\].*refresh_per_second must be positive"):
        check_config(config("HOOKS", '[{"NAME": "ProgressBar", "ARGS": {"refresh_per_second": 0}}]'))


@pytest.mark.slow
def test_two_ranks_in_a_terminal_show_one_bar_and_ctrl_c_ends_both(tmp_path):
    """Run the tool in a terminal."""
    hook = tmp_path / "slow_steps.py"
    hook.write_text(
        "import os, time\n"
        "from hookline.hooks import HookBase\n"
        "class Slow(HookBase):\n"
        "    def after_step(self):\n"
        "        time.sleep(0.02)\n"
        "        if self.trainer.iter == 25 and os.environ['RANK'] == '0': print('rank', 0, 'prints')\n"
    )
    config_file = ROOT / "configs/synthetic/mlp.yaml"
    command = [sys.executable, str(ROOT / "tools/train_net.py"), "--config-file", str(config_file), "--num-gpus", "2"]
    command += ["MODEL.DEVICE", "cpu", "SOLVER.MAX_ITER", "5000", "TEST.EVAL_PERIOD", "0"]
    command += ["OUTPUT_DIR", str(tmp_path / "run"), "HOOKS", json.dumps([{"NAME": "slow_steps:Slow"}])]
    process, master = pty.fork()
    if not process:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(tmp_path), TERM="xterm-256color", COLUMNS="120")
        os.execv(command[0], command)
    received, asked = b"", False
    deadline = time.monotonic() + 200
    try:
        while time.monotonic() < deadline:
            try:
                received += os.read(master, 65536)
            except OSError:
                break
            if not asked and b"rank 0 prints" in received:
                os.write(master, b"\x03")  # Ctrl-C, to all processes of the terminal
                asked = True
        _, status = os.waitpid(process, 0)
    except BaseException:
        os.kill(process, signal.SIGKILL)
        raise
    text = received.decode()
    assert os.waitstatus_to_exitcode(status) == 130, text
    lines = screen(text, 80)
    assert "rank 0 prints" in lines
    # Besides the final bar there may be one with the terminal's echo of Ctrl-C.
    typed = next((number for number, line in enumerate(lines) if line.startswith("Ctrl-C: ")), None)
    assert typed is not None, text
    bars = [number for number, line in enumerate(lines) if re.match(r"(epoch .*: )?.*%.* \d+/5000 ", line)]
    assert len([number for number in bars if number not in (typed - 1, typed - 2)]) == 1, text
    assert "the same command with --resume" in text.split("Next:")[1]
    logs = [path.read_text() for path in (tmp_path / "run").glob("log.txt*")]
    assert len(logs) == 2
    assert not any("\x1b" in text or "█" in text for text in logs)
