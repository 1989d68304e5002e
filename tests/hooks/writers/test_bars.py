"""The progress bar in terminals of several kinds, and what a notebook shows."""

import contextlib
import logging
import re
import sys
from types import SimpleNamespace

import pytest
from metric_runs import train_losses
from small_runs import make_trainer
from terminals import Terminal
from torch import nn

from hookline.engine import TrainerBase
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.setup.logger import setup_logger
from hookline.hooks import (
    BestCheckpointer,
    CallbackHook,
    CommonMetricPrinter,
    EvalHook,
    IterationTimer,
    LivePlot,
    PeriodicWriter,
    ProgressBar,
)
from hookline.hooks.hook_list import overrides
from hookline.hooks.writers.bars import with_progress

COUNT = re.compile(r"\b\d+/\d+\b")


@pytest.fixture
def open_terminal(monkeypatch):
    """Opens a terminal that takes the output from then on."""
    with contextlib.ExitStack() as stack:

        def open_one(columns=120, rows=40):
            terminal = stack.enter_context(Terminal(columns, rows=rows))
            terminal.monkeypatch = monkeypatch
            terminal.take_output()
            return terminal

        yield open_one


@pytest.fixture(autouse=True)
def bars_only(monkeypatch):
    """Draw the bar after each step. Restore the logger to its state before a run sets it up."""
    monkeypatch.setattr("hookline.hooks.writers.bars._INTERVAL", 0.0)
    monkeypatch.setattr(logging.getLogger("hookline"), "handlers", [])


class Trainer(TrainerBase):
    """A trainer with empty steps, which a test makes wait for the terminal."""

    def run_step(self):
        self.storage.put_scalars(total_loss=1 / (self.iter + 1), time=0.1, data_time=0.02)
        self.storage.put_scalar("lr", 0.1 / (self.iter + 1), smoothing_hint=False)


def shows(terminal, at, what):
    """A hook that waits until the terminal shows ``what`` in iteration ``at``."""
    return CallbackHook(before_step=lambda trainer: terminal.until(what) if trainer.iter == at else None)


def train(*hooks, end=10, trainer=None):
    trainer = trainer or Trainer()
    trainer.register_hooks([ProgressBar(), *hooks])
    return trainer.train(0, end)


def shown_bars(terminal):
    terminal.close()
    return [line for line in terminal.screen() if COUNT.search(line)]


def batches_that(check):
    for number in range(4):
        if number == 2:
            check()
        yield number


def test_a_long_evaluation_shows_its_batches_in_a_terminal(open_terminal, monkeypatch):
    monkeypatch.setattr("hookline.hooks.writers.bars._DELAY", 0.0)
    terminal = open_terminal()
    batches = batches_that(lambda: terminal.until(r"^Evaluating test: +50%\|.*\| 2/4 "))
    assert list(with_progress(batches, 4, "Evaluating test")) == [0, 1, 2, 3]
    assert not shown_bars(terminal)


@pytest.mark.parametrize(("total", "expected"), [(4, r"2/4 batches, \d+ s left"), (None, "2 batches")])
def test_a_long_evaluation_logs_its_batches_elsewhere(log, monkeypatch, total, expected):
    monkeypatch.setattr("hookline.hooks.writers.bars._LINE_INTERVAL", 0.0)
    seen = []
    list(with_progress(batches_that(lambda: seen.append(log.messages[-1])), total, "Evaluating test"))
    assert re.fullmatch(f"Evaluating test: {expected}", *seen)


@pytest.mark.parametrize("rows", [40, 0])  # 0: not known
def test_the_bar_shows_the_progress_and_stays_full_at_the_end(rows, open_terminal):
    terminal = open_terminal(rows=rows)
    train(
        shows(terminal, 0, r"^  0%\| +\| 0/10 \[\? left, \?it/s\]$"),
        shows(terminal, 7, r"^ 70%\|█+.? +\| 7/10 \[00:\d\d left, +[\d.]+it/s\]$"),
    )
    last = shown_bars(terminal)[-1]
    assert re.fullmatch(r"100%\|█+\| 10/10 \[00:00 left, +[\d.]+it/s\]", last)
    assert terminal.screen()[-1] == ""
    assert sys.stdout is terminal.stream


def test_the_bar_shows_what_was_last_written_the_best_metric_and_evaluations(open_terminal, tmp_path):
    """The loss is the median of those written: 0.4167 of 1, 1/2, 1/3 and 1/4."""
    terminal = open_terminal()

    def evaluate():
        terminal.until(r"^evaluating:  \d0%.* [48]/10 ")
        return {"test": {"accuracy": 0.75}}

    trainer = Trainer()
    to_come = CallbackHook(after_eval=lambda trainer, results: trainer.storage.evaluations_left.update(a=3599.6))
    best = BestCheckpointer(4, Checkpointer(nn.Linear(1, 1), str(tmp_path)), "test/accuracy")
    hooks = EvalHook(4, evaluate, eval_after_train=False), to_come, best, PeriodicWriter([], period=4)
    early = shows(terminal, 3, r" 3/10 (?!.*loss)")
    late = shows(terminal, 6, r"^ 60%.* 6/10 \[1:00:00 left, .* loss 0.4167, lr 0.025, best 0.75, data 20%\]$")
    train(*hooks, early, late, trainer=trainer)


def test_the_bar_shows_the_epoch_if_known_and_is_never_wider_than_the_terminal(open_terminal):
    terminal = open_terminal(40)
    train(shows(terminal, 5, "^epoch 2/3:  42%"), trainer=make_trainer(), end=12)
    terminal.close()
    bar, _ = terminal.screen()
    assert bar.startswith("epoch 3/3: 100%")
    assert len(bar) <= 40


class Logs(Trainer):
    """Losses named otherwise, and metrics of one's own."""

    def run_step(self):
        self.storage.put_scalars(ce=0.75, dice=0.5, total_loss=1.25, time=0.1, data_time=0.02, lr=0.1)
        self.storage.put_scalar("weight_norm", 12345.6)
        self.storage.put_scalar("share_{of}_tokens", 0.25, bar=True)


FIELDS = ["share_{of}_tokens 0.25", "loss 1.25", "lr 0.1", "ce 0.75", "dice 0.5", "weight_norm 12346", "data 20%"]


@pytest.mark.parametrize(("columns", "at_least"), [(18, 0), (60, 1), (65, 1), (80, 2), (100, 3), (200, 7)])
def test_the_bar_shows_whole_fields_that_fit_the_most_important_ones_first(open_terminal, columns, at_least):
    """How many depends on the width of the rate."""
    terminal = open_terminal(columns)
    train(PeriodicWriter([], 5), shows(terminal, 7, r"\b7/10"), trainer=Logs())
    bar = shown_bars(terminal)[-1]
    assert len(bar) <= columns
    found = re.fullmatch(r"(?:100%\|(█+)\| )?10/10(?: \[(?:00:00 left)?(?:, +[\d.]+it/s)?,? ?(.*)\])?", bar)
    assert found, bar
    assert found[1] is None or len(found[1]) >= 6
    fields = found[2].split(", ") if found[2] else []
    assert len(fields) >= at_least
    assert fields == FIELDS[: len(fields)]  # a field that does not fit is not replaced by a shorter one


def test_log_lines_appear_above_the_bar_and_the_log_file_is_plain(open_terminal, tmp_path):
    terminal = open_terminal()
    logger = setup_logger(str(tmp_path))

    def say(trainer):
        terminal.until(rf" {trainer.iter}/10 ")
        logger.info("logged at %d", trainer.iter)
        if trainer.iter == 5:
            logger.warning("careful")

    train(IterationTimer(), PeriodicWriter([CommonMetricPrinter(10)], 5), CallbackHook(before_step=say))
    assert len(shown_bars(terminal)) == 1
    lines = terminal.screen()
    logged = [line.split("  ")[1] for line in lines if "logged" in line]
    assert logged == [f"logged at {number}" for number in range(10)]
    assert not any("iter:" in line for line in lines)  # the bar shows it
    assert re.search("\x1b\\[33m[\\d:]+  WARNING: careful\x1b\\[0m\r\n", terminal.text)
    text = (tmp_path / "log.txt").read_text()
    assert "careful" in text
    assert len(re.findall(r"eta: 0:00:00  iter: [49]/10  total_loss: ", text)) == 2
    assert "\x1b" not in text
    assert "█" not in text


def test_a_failure_is_shown_above_the_bar_and_restores_the_terminal(open_terminal):
    terminal = open_terminal()
    setup_logger()

    def fail(trainer):
        if trainer.iter == 4:
            terminal.until(" 4/10 ")
            raise ValueError("the real error")

    with pytest.raises(ValueError, match="the real error"):
        train(CallbackHook(before_step=fail))
    assert sys.stdout is terminal.stream
    assert len(shown_bars(terminal)) == 1
    lines = terminal.screen()  # which has no escape codes to undo
    assert " 4/10 " in lines[-2]
    assert any(line.endswith("Exception during training, at iteration 4: ValueError: the real error") for line in lines)


@pytest.mark.parametrize("place", ["a file", "a dumb terminal"])
def test_elsewhere_there_is_no_bar_and_no_call_in_a_step(place, open_terminal, tmp_path, monkeypatch):
    terminal = open_terminal()
    trainer = Trainer()
    if place == "a file":
        monkeypatch.setattr(sys, "stdout", open(tmp_path / "out", "w"))  # noqa: SIM115 (closed below)
    else:
        monkeypatch.setenv("TERM", "dumb")
    with sys.stdout:
        train(trainer=trainer)
    terminal.close()
    assert terminal.text == ""
    assert not any(path.read_text() for path in tmp_path.iterdir())
    assert not overrides(trainer.find_hook(ProgressBar), "after_step")


def test_a_live_plot_has_losses_and_metrics_each_once(monkeypatch):
    Figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr("hookline.hooks.writers.bars.in_notebook", lambda: True)
    shown = SimpleNamespace(Image=lambda data: data, display=lambda *_, **__: SimpleNamespace(update=lambda _: None))
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))

    def put(trainer):
        trainer.storage.put_scalars(total_loss=float(trainer.iter), lr=0.1, grad_norm=9.0)
        trainer.storage.put_scalar("seen", trainer.iter, bar=True)

    evaluation = EvalHook(20, lambda: {"test": {"accuracy": 0.5, "loss": 0.1}})
    train_losses(CallbackHook(after_step=put), evaluation, LivePlot(), end=60)
    names = {axes.get_title(): [text.get_text() for text in axes.get_legend().texts] for axes in figures[-1].axes}
    assert names == {"losses": ["loss", "test/loss"], "metrics": ["seen", "test/accuracy"]}


CELLS = [
    """
import os, signal, torch
from torch import nn
from hookline import Trainer
from hookline.hooks import CallbackHook, LivePlot
x = torch.randn(64, 4); y = (x.sum(1) > 0).long()
press_stop = CallbackHook(after_step=lambda trainer: trainer.iter == 20 and os.kill(os.getpid(), signal.SIGINT))
trainer = Trainer(nn.Linear(4, 2), (x, y), (x, y), loss=nn.CrossEntropyLoss(), metrics=["Accuracy"], lr=0.1,
                  length=40, batch_size=16, eval_period=20, hooks=[LivePlot(), press_stop])
""",
    "result = trainer.train(); print('first:', result.reason, result.iteration)",
    "result = trainer.train(); print('second:', result.reason, result.iteration)",
    "trainer.storage.to_pandas()[['loss', 'lr']].tail(2)",
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_notebook_has_a_bar_a_table_and_a_plot_and_can_be_interrupted(tmp_path):
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(text.strip()) for text in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell["outputs"] for cell in notebook.cells[1:]]
    texts = ["".join(one.get("text", "") for one in shown if one["output_type"] == "stream") for shown in outputs]
    assert "first: interrupted by SIGINT 21" in texts[0]
    assert "second: completed 40" in texts[1]
    assert "Traceback" not in "".join(texts)
    assert "iter:" not in texts[0]  # the bar shows it
    for shown, rows in zip(outputs, ([20], [40]), strict=False):
        displayed = [one["data"] for one in shown if one["output_type"] == "display_data"]
        [table] = [data["text/html"] for data in displayed if "text/html" in data]
        assert [int(row) for row in re.findall(r"<tr><td>(\d+)</td>", table)] == rows
        assert sum("image/png" in data for data in displayed) == 1
        assert any("/40 [" in data["text/plain"] for data in displayed)  # the bar
    assert "text/html" in outputs[2][0]["data"]
