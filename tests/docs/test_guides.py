"""The programs of docs/porting/: those of the other systems, where they are installed, are as accurate as ours."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from snippets import Page
from torch import nn

from hookline import Trainer
from hookline.config import ConfigError
from hookline.engine.data import ArrayDataset
from hookline.hooks import EarlyStopping

FOLDER = Path(__file__).parents[2] / "docs" / "porting"
PACKAGES = {
    "huggingface": "transformers accelerate",
    "lightning": "lightning torchmetrics",
    "pytorch-accelerated": "pytorch_accelerated torchmetrics",
    "mmengine": "mmengine",
    "fastnlp": "fastNLP",
}


def programs(name):
    """The page's programs by their file's name; data, model and our program are on a page of their own."""
    found = {}
    for snippet in [*Page(FOLDER / "program.md").snippets, *Page(FOLDER / f"{name}.md").snippets]:
        first = re.match(r"# ([\w./]+\.py)\n", snippet.text)
        if snippet.language in ("python", "py") and first:
            found[first[1]] = snippet.text
    return found


def accuracy(folder, program, *options):
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    command = [sys.executable, program, *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "predicted: [" in done.stdout
    return float(re.findall(r"accuracy: ([\d.]+)$", done.stdout, re.MULTILINE)[-1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PACKAGES)
def test_both_programs_are_as_accurate(name, tmp_path):
    for package in PACKAGES[name].split():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for file, text in programs(name).items():
        (tmp_path / file).write_text(text)
    ours, theirs = accuracy(tmp_path, "ours.py"), accuracy(tmp_path, "theirs.py")
    assert ours > 0.94
    assert abs(ours - theirs) < 0.03
    assert accuracy(tmp_path, "ours.py", "--resume") == ours
    assert accuracy(tmp_path, "theirs.py", "--resume") > 0.94


class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


class Named(Net):
    def forward(self, x):
        return {"pred": super().forward(x), "more": x}

    def train_step(self, batch):
        return {"loss": self(batch[0])["pred"].sum()}


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()


class C:
    """A callback of another system."""


DATA = ArrayDataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))


def make(folder, model=Net, data=DATA, **arguments):
    given = {"loss": nn.CrossEntropyLoss(), "metrics": ["Accuracy"], "length": 1, "batch_size": 2, **arguments}
    return Trainer(model, data, DATA, output_dir=folder, **given)


def strange_optimizer():
    return torch.optim.AdamW(Net().parameters())


MISTAKES = {
    "a loader has": lambda folder: make(folder, data=torch.utils.data.DataLoader(DATA, 2)),
    "HOOKS[0].ARGS": lambda folder: make(folder, hooks=[EarlyStopping("eval_accuracy")]),
    "argument 'num_train": lambda folder: make(folder, num_train_epochs=1),
    "argument 'callbacks'": lambda folder: make(folder, callbacks=[]),
    "cannot be the hook": lambda folder: make(folder, hooks=[C()]),
    "missing the required": lambda folder: make(folder, LM, loss=None).train(),
    "attribute 'fit'": lambda folder: make(folder).fit(),
    "any parameter of the model": lambda folder: make(folder, Net(), optimizer=strange_optimizer()).train(),
    "takes one tensor": lambda folder: make(folder, Named, loss=None).train(),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_errors_are_as_the_page_shows_them(name, tmp_path):
    lines = (FOLDER / f"{name}.md").read_text().split("## What is different")[1].splitlines()
    shown = [error[1] for line in lines if (error := re.search(r"\| `([^|]*)` \|$", line))]
    assert shown
    for number, error in enumerate(shown):
        (mistake,) = (make for part, make in MISTAKES.items() if part in error)
        with pytest.raises((ConfigError, TypeError, AttributeError, NotImplementedError, KeyError)) as caught:
            mistake(tmp_path / str(number))
        assert error in str(caught.value)
