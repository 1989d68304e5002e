"""Prediction with a trained model."""

import pytest
import torch

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultPredictor, DefaultTrainer
from hookline.engine.data import get_dataset
from hookline.hooks import EMA


@pytest.fixture
def cfg(tmp_path):
    cfg = get_cfg()
    cfg.MODEL.NAME = "MLP"
    cfg.MODEL.LOSS.NAME = "CrossEntropyLoss"
    cfg.merge_from_list(["MODEL.ARGS.in_features", 8, "MODEL.ARGS.num_classes", 4])
    cfg.DATASETS.TRAIN = ("synthetic",)
    cfg.SOLVER.MAX_ITER = 5
    cfg.LOG.WRITERS = []
    cfg.OUTPUT_DIR = str(tmp_path)
    return cfg


def test_it_predicts_like_the_trained_model(cfg, tmp_path):
    trainer = DefaultTrainer(cfg)
    trainer.train()
    cfg.MODEL.WEIGHTS = str(tmp_path / "model_final.pth")
    predict = DefaultPredictor(cfg)
    x, _ = get_dataset("synthetic", "DATASETS.TRAIN")[3]
    trainer.model.eval()
    assert torch.equal(predict(x), trainer.model(x[None])[0])
    assert not predict(x).requires_grad


def test_it_predicts_with_averaged_weights_if_the_run_evaluated_them(cfg, tmp_path):
    cfg.HOOKS = [{"NAME": "EMA", "ARGS": {"decay": 0.9, "warmup": False}}]
    trainer = DefaultTrainer(cfg)
    trainer.train()
    cfg.MODEL.WEIGHTS = str(tmp_path)
    x, _ = get_dataset("synthetic", "DATASETS.TRAIN")[3]
    averaged = DefaultPredictor(cfg)(x)
    cfg.MODEL.WEIGHTS_FROM = "model"
    own = DefaultPredictor(cfg)(x)
    assert torch.equal(own, trainer.model.eval()(x[None])[0])
    assert not torch.equal(averaged, own)
    with trainer.find_hook(EMA).averaged_weights():
        assert torch.equal(averaged, trainer.model.eval()(x[None])[0])


def test_empty_weights_are_an_error(cfg):
    with pytest.raises(ConfigError, match=r"MODEL\.WEIGHTS: is empty"):
        DefaultPredictor(cfg)
