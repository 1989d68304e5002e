"""Prediction with a trained model."""

import numpy as np
import pytest
import torch
from small_runs import mlp_config
from torch import nn

from hookline.config import ConfigError
from hookline.engine import DefaultPredictor, DefaultTrainer
from hookline.engine.data.datasets import get_dataset
from hookline.hooks import EMA


def test_it_predicts_like_the_model_or_the_average_that_the_run_evaluated(tmp_path):
    cfg = mlp_config(tmp_path, "HOOKS", [{"NAME": "EMA", "ARGS": {"decay": 0.9, "warmup": False}}])
    with pytest.raises(ConfigError, match=r"MODEL\.WEIGHTS"):
        DefaultPredictor(cfg)
    trainer = DefaultTrainer(cfg)
    trainer.train()
    cfg.MODEL.WEIGHTS = str(tmp_path)
    x, _ = get_dataset("synthetic", "DATASETS.TRAIN")[3]
    averaged = DefaultPredictor(cfg)(x)
    cfg.MODEL.WEIGHTS_FROM = "model"
    predict = DefaultPredictor(cfg)
    own = predict(x)
    assert torch.equal(own, trainer.model.eval()(x[None])[0])
    assert torch.equal(own, predict.batch(x.numpy()[None])[0])
    assert not own.requires_grad
    assert not torch.equal(averaged, own)
    with trainer.find_hook(EMA).averaged_weights():
        assert torch.equal(averaged, trainer.model.eval()(x[None])[0])


class Heads(nn.Module):
    """Takes a dict or two tensors; returns a dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x, scale):
        return {"logits": self.layer(x) * scale, "both": (x, scale)}


@pytest.mark.parametrize("as_type", [torch.as_tensor, np.asarray])
def test_samples_may_be_dicts_tuples_and_arrays(tmp_path, as_type):
    torch.save(Heads().state_dict(), tmp_path / "heads.pth")
    keys = ("MODEL.NAME", f"{__name__}:Heads", "MODEL.ARGS", {}, "MODEL.LOSS.NAME", "", "MODEL.DEVICE", "cpu")
    predict = DefaultPredictor(mlp_config(tmp_path, *keys, "MODEL.WEIGHTS", str(tmp_path / "heads.pth")))
    x, scale = as_type(torch.tensor([1.0, 2.0])), as_type(torch.tensor([2.0]))
    expected = 2 * predict.model.layer(torch.tensor([1.0, 2.0]))
    for sample in ({"x": x, "scale": scale}, (x, scale)):
        found = predict(sample)
        assert torch.allclose(found["logits"], expected)
        assert found["both"][0].shape == (2,)
    batch = predict.batch([{"x": x, "scale": scale}] * 3)
    assert torch.allclose(batch["logits"], expected.expand(3, 3))
    assert predict.batch({"x": torch.ones(4, 2), "scale": torch.ones(4, 1)})["logits"].shape == (4, 3)
