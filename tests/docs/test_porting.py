"""The errors that the pages of docs/porting/ show are those that a user gets."""

import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from hookline import Trainer
from hookline.config import CfgNode, get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer, TrainerBase
from hookline.engine.checkpoint import DetectionCheckpointer
from hookline.engine.data import ArrayDataset
from hookline.engine.modeling import META_ARCH_REGISTRY
from hookline.engine.solver import build_optimizer
from hookline.hooks import CallbackHook, EventStorage

FOLDER = Path(__file__).parents[2] / "docs" / "porting"
# The errors in the last column of the tables of differences or refusals.
SHOWN = [
    pytest.param(error, id=f"{page.stem}: {error[:50]}")
    for page in sorted(FOLDER.glob("*.md"))
    for part in re.findall(r"^## (?:What is different|Refused)\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    for error in re.findall(r"\| `([^|`]*)`[^|`]*(?:`[^|`]*`)?[^|`]* \|$", part, re.MULTILINE)
]


def load_weights(name):
    DetectionCheckpointer(nn.Linear(1, 1)).load(name)


def load_pickle():
    Path("R-50.pkl").write_bytes(pickle.dumps({"model": {}}))
    load_weights("R-50.pkl")


def merge(text, name="config.yaml"):
    Path(name).write_text(text)
    get_cfg().merge_from_file(name)


def choose_optimizer():
    cfg = get_cfg()
    cfg.SOLVER.OPTIMIZER = CfgNode({"NAME": "LARS"})
    build_optimizer(cfg, nn.Linear(1, 1))


class Ported(DefaultTrainer):
    def __init__(self, cfg):
        TrainerBase.__init__(self)
        model = nn.Linear(1, 1)
        self._trainer = SimpleTrainer(model, iter(()), torch.optim.SGD(model.parameters(), 0.1))
        self.cfg, self.start_iter, self.max_iter = cfg, 0, 4

    def train(self):
        with EventStorage(0) as self.storage:
            self.before_train()
            for self.iter in range(4):
                self.before_step()
                self.after_step()


def set_a_model_as_inner_trainer():
    Ported(get_cfg())._trainer = nn.Linear(1, 1)


def stop_an_own_loop():
    trainer = Ported(get_cfg())
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.request_stop("enough"))])
    trainer.train()


def create_a_trainer_without_metrics():
    class Trainer(DefaultTrainer):
        @classmethod
        def build_test_loader(cls, cfg, dataset_name):
            return []

    cfg = get_cfg()
    cfg.DATASETS.TEST = ("mine",)
    Trainer(cfg)


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


def train(model=Net, **arguments):
    data = ArrayDataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
    usual = {"loss": nn.CrossEntropyLoss(), "metrics": ["Accuracy"], "length": 1, "batch_size": 2}
    trainer = Trainer(model, data, data, **{**usual, **arguments})
    trainer.train()
    return trainer


# Parts of the errors, and how a person gets them.
MISTAKES = {
    "R-50.pkl is a pickle": load_pickle,
    "detectron2://": lambda: load_weights("detectron2://ImageNetPretrained/MSRA/R-50.pkl"),
    "IMS_PER_BATCH": lambda: merge("SOLVER: {IMS_PER_BATCH: 2}"),
    "INPUT.MIN_SIZE_TEST": lambda: merge("INPUT: {MIN_SIZE_TEST: 800}"),
    "for the tag": lambda: merge("SOLVER: !!python/object/apply:os.getcwd []"),
    "a Python file": lambda: merge("x = 1", "config.py"),
    "LARS": choose_optimizer,
    "_trainer must be": set_a_model_as_inner_trainer,
    "self.stop_requested": stop_an_own_loop,
    "TEST.METRICS": create_a_trainer_without_metrics,
    "'ResNet'": lambda: META_ARCH_REGISTRY.register(type("ResNet", (nn.Module,), {})),
    "argument 'num_train": lambda: train(num_train_epochs=1),
    "argument 'callbacks'": lambda: train(callbacks=[]),
    "cannot be the hook": lambda: train(hooks=[C()]),
    "missing the required": lambda: train(LM, loss=None),
    "attribute 'fit'": lambda: train().fit(),
    "any parameter of the model": lambda: train(Net(), optimizer=torch.optim.AdamW(Net().parameters())),
    "takes one tensor": lambda: train(Named, loss=None),
}


def test_every_mistake_is_on_a_page():
    assert [part for part in MISTAKES if not any(part in error.values[0] for error in SHOWN)] == []


@pytest.mark.parametrize("error", SHOWN)
def test_an_error_is_as_the_page_shows_it(error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (mistake,) = (mistake for part, mistake in MISTAKES.items() if part in error)
    with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError)) as caught:
        mistake()
    assert error in str(caught.value)
