"""The errors that docs/porting/detectron2.md shows are those that a user gets."""

import pickle
import re
from pathlib import Path

import pytest
import torch

from hookline.config import CfgNode, ConfigError, get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer, TrainerBase
from hookline.engine.checkpoint import DetectionCheckpointer
from hookline.engine.modeling import META_ARCH_REGISTRY
from hookline.engine.solver import build_optimizer
from hookline.hooks import CallbackHook, EventStorage

PAGE = Path(__file__).parents[2] / "docs" / "porting" / "detectron2.md"


def load_weights(name):
    DetectionCheckpointer(torch.nn.Linear(1, 1)).load(name)


def load_pickle():
    Path("R-50.pkl").write_bytes(pickle.dumps({"model": {}}))
    load_weights("R-50.pkl")


def merge(text, name="config.yaml"):
    Path(name).write_text(text)
    get_cfg().merge_from_file(name)


def choose_optimizer():
    cfg = get_cfg()
    cfg.SOLVER.OPTIMIZER = CfgNode({"NAME": "LARS"})
    build_optimizer(cfg, torch.nn.Linear(1, 1))


class Ported(DefaultTrainer):
    def __init__(self, cfg):
        TrainerBase.__init__(self)
        model = torch.nn.Linear(1, 1)
        self._trainer = SimpleTrainer(model, iter(()), torch.optim.SGD(model.parameters(), 0.1))
        self.cfg, self.start_iter, self.max_iter = cfg, 0, 4

    def train(self):
        with EventStorage(0) as self.storage:
            self.before_train()
            for self.iter in range(4):
                self.before_step()
                self.after_step()


def set_a_model_as_inner_trainer():
    Ported(get_cfg())._trainer = torch.nn.Linear(1, 1)


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


REFUSED = {
    "models as pickles": load_pickle,
    "detectron2://": lambda: load_weights("detectron2://ImageNetPretrained/MSRA/R-50.pkl"),
    "old names": lambda: merge("SOLVER: {IMS_PER_BATCH: 2}"),
    "keys for detection": lambda: merge("INPUT: {MIN_SIZE_TEST: 800}"),
    "Python tags": lambda: merge("SOLVER: !!python/object/apply:os.getcwd []"),
    "YACS configs": lambda: merge("x = 1", "config.py"),
    "other optimizers": choose_optimizer,
    "self._trainer = model": set_a_model_as_inner_trainer,
    "early stopping of a loop": stop_an_own_loop,
    "test sets without": create_a_trainer_without_metrics,
    "another class": lambda: META_ARCH_REGISTRY.register(type("ResNet", (torch.nn.Module,), {})),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_error_is_as_the_page_shows_it(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith("| ") and what in line.split(" | ")[0])
    shown = re.search(r"`(.+?)`", row.split(" | ")[1])[1]
    with pytest.raises((ConfigError, TypeError, RuntimeError, AttributeError)) as caught:
        REFUSED[what]()
    assert shown in str(caught.value)
