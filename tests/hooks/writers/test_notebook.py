"""Sessions in a notebook: in a real kernel (slow), and with an IPython that collects what is displayed."""

import sys
import types

import pytest

from hookline.config import ConfigError
from hookline.engine import TrainerBase
from hookline.hooks import LivePlot, PeriodicWriter, ProgressBar
from hookline.hooks.control.interruption import in_notebook
from hookline.hooks.writers.bars import bar_is_shown


class Trainer(TrainerBase):
    def run_step(self):
        self.storage.put_scalars(total_loss=1 / (self.iter + 1), loss=1 / (self.iter + 1))
        self.storage.put_scalar("lr", 0.1, smoothing_hint=False)
        if self.iter % 5 == 4:
            self.storage.put_scalar("test/accuracy", self.iter / 20, smoothing_hint=False)


@pytest.fixture
def displayed(monkeypatch):
    """What a notebook shows at each place, in order."""
    places = []

    class Handle:
        def __init__(self, shown):
            self.shown = [shown]

        def update(self, shown):
            self.shown.append(shown)

    def display(shown, display_id):
        assert display_id is True
        places.append(Handle(shown))
        return places[-1]

    module = types.ModuleType("IPython")
    module.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    module.version_info = (9, 0)  # matplotlib asks
    module.display = types.ModuleType("IPython.display")
    module.display.display, module.display.Image = display, bytes
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", module.display)
    return places


@pytest.mark.usefixtures("displayed")
def test_a_notebook_has_a_bar(capsys):
    assert in_notebook()
    trainer = Trainer()
    trainer.register_hooks([ProgressBar(), PeriodicWriter([], 5)])
    trainer.train(0, 10)
    first, *_, last = capsys.readouterr().out.strip("\r\n").split("\r")
    assert first.startswith("  0%|")
    assert last.startswith("100%|")
    assert last.rstrip().endswith(", loss 0.1833, lr 0.1]")  # the median of 1, 1/2, to 1/10
    assert not bar_is_shown()


def test_a_plot_is_drawn_again_at_one_place(displayed):
    pytest.importorskip("matplotlib")
    trainer = Trainer()
    trainer.register_hooks([LivePlot(seconds=0), PeriodicWriter([], 5)])
    trainer.train(0, 20)
    (plot,) = displayed
    assert plot.shown
    assert all(image.startswith(b"\x89PNG") for image in plot.shown)


def test_the_plot_has_a_panel_for_losses_and_one_for_results(displayed):
    pytest.importorskip("matplotlib")
    trainer = Trainer()
    trainer.train(0, 20)
    histories = trainer.storage.histories()
    panels = {
        axes.get_title(): [line.get_label() for line in axes.lines] for axes in LivePlot()._figure(histories).axes
    }
    assert panels == {"*loss*": ["loss"], "*/*": ["test/accuracy"]}
    (axes,) = LivePlot(["test/*", "nothing"])._figure(histories).axes
    assert axes.lines[0].get_xdata().tolist() == [4, 9, 14, 19]
    assert LivePlot()._figure({}) is None


def test_outside_of_a_notebook_a_plot_does_nothing(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    trainer = Trainer()
    trainer.register_hooks([LivePlot(seconds=0), PeriodicWriter([], 5)])
    trainer.train(0, 10)
    assert not in_notebook()


def test_wrong_arguments_of_a_plot():
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="metrics is a list of names or patterns, not 'loss'"):
        LivePlot("loss")


CELLS = [
    """
import os, signal, torch
from torch import nn
from hookline import Trainer
from hookline.hooks import CallbackHook, LivePlot, on
x = torch.randn(256, 4); y = (x.sum(1) > 0).long()

def interrupt(trainer):
    if trainer.iter == 20:
        os.kill(os.getpid(), signal.SIGINT)  # what a notebook's stop button does

stop = CallbackHook(after_step=interrupt)
""",
    """
from hookline.engine.modeling import MODEL_REGISTRY

@MODEL_REGISTRY.register()
class NotebookNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
    def forward(self, x):
        return self.fc(x)
""",
    """
trainer = Trainer("NotebookNet", (x, y), (x, y), loss=nn.CrossEntropyLoss(), metrics=["Accuracy"], lr=0.1,
                  optimizer="SGD", length=60, batch_size=16, eval_period=20, seed=1, output_dir="runs/my run",
                  lr_scheduler="WarmupCosineLR", hooks=[LivePlot(seconds=0), stop])
""",
    "result = trainer.train(); print('first:', result.reason, result.iteration)",
    "result = trainer.train(); print('second:', result.reason, result.iteration)",
    "trainer.max_iter = 90; result = trainer.train(); print('third:', result.iteration, result.metrics['lr'])",
    "trainer.storage.to_pandas()[['loss', 'lr']].tail(2)",
    "iterations, losses = trainer.storage.history('loss').arrays(); print('values:', len(losses), iterations[-1])",
    "print(trainer.evaluate()['test'].keys())",
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_notebook_with_interrupts_and_plots_runs(tmp_path):
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(text.strip()) for text in [*CELLS[:2], *CELLS[1:]]]  # the class twice
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell["outputs"] for cell in notebook.cells[4:]]
    texts = ["".join(one.get("text", "") for one in shown if one["output_type"] == "stream") for shown in outputs]
    assert "first: interrupted by SIGINT 21" in texts[0]
    assert texts[0].count("Ctrl-C: stopping after this step") == 1
    assert "Traceback" not in "".join(texts)
    assert "iter:" not in texts[0]  # the bar shows it
    assert "second: completed 60" in texts[1]
    assert "third: 90" in texts[2]
    for shown, end in zip(outputs[:3], ("21/60", "60/60", "90/90"), strict=True):
        pages = [one["data"] for one in shown if one["output_type"] == "display_data"]
        bars = [page["text/plain"] for page in pages if "%|" in page.get("text/plain", "")]  # with ipywidgets
        assert bars or f"{end} [" in "".join(one.get("text", "") for one in shown)
        assert sum("image/png" in page for page in pages) == 1
    assert "text/html" in outputs[3][0]["data"]
    assert "values: 90 89" in texts[4]
    assert "dict_keys(['accuracy'])" in texts[5]
