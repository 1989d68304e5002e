import json

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer
from hookline.engine.evaluation.build import METRICS_SLOT, TrainingMetrics, build_metrics


class Own(nn.Module):
    """Computes its loss, as models of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, batch):
        logits = self.layer(batch[0])
        return {"loss": nn.functional.cross_entropy(logits, batch[1]), "logits": logits}


def share_of_class_0(predictions, targets):
    return {"first": (predictions.argmax(1) == 0).float().mean().item()}


HERE = __name__


def config(tmp_path, *keys):
    cfg = get_cfg()
    cfg.merge_from_file("configs/synthetic/mlp.yaml")
    metrics = [
        "Accuracy",
        {"NAME": "torchmetrics:Accuracy", "ARGS": {"task": "multiclass", "num_classes": 4}, "AS": "tm"},
    ]
    cfg.LOG.TRAIN_METRICS = [*metrics, f"{HERE}:share_of_class_0"]
    cfg.merge_from_list(["OUTPUT_DIR", str(tmp_path), "SOLVER.MAX_ITER", 4, "LOG.PERIOD", 2, *keys])
    return cfg


def test_training_batches_have_metrics_named_train(tmp_path):
    pytest.importorskip("torchmetrics")
    trainer = DefaultTrainer(config(tmp_path))
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    rows = [row for row in rows if "total_loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert 0 < row["train/accuracy"] <= 1
        assert row["train/tm"] == pytest.approx(row["train/accuracy"])
        assert 0 <= row["train/first"] <= 1


def test_a_model_with_its_own_loss_has_them_too(tmp_path):
    own = ("MODEL.NAME", f"{HERE}:Own", "MODEL.LOSS.NAME", "", "MODEL.OUTPUT_MAPPING.logits", "preds")
    cfg = config(tmp_path, *own)
    cfg.LOG.TRAIN_METRICS = ["Accuracy"]
    trainer = DefaultTrainer(cfg)
    result = trainer.train()
    assert {"train/accuracy", "synthetic/loss", "synthetic/accuracy"} <= set(result.metrics)


def test_the_loss_of_the_model_is_refused():
    cfg = get_cfg()
    cfg.TEST.METRICS = ["Loss"]
    with pytest.raises(ConfigError, match=r"TRAIN_METRICS.*leave out Loss"):
        TrainingMetrics(build_metrics(cfg, METRICS_SLOT))


def test_the_value_is_that_of_the_batch(tmp_path):
    cfg = config(tmp_path, "SOLVER.MAX_ITER", 1, "SOLVER.BASE_LR", 0.0)
    cfg.LOG.TRAIN_METRICS = ["Accuracy"]
    trainer, batches = DefaultTrainer(cfg), []
    trainer.fetch = lambda fetch=trainer.fetch: batches.append(fetch()) or batches[-1]
    value = trainer.train().metrics["train/accuracy"]
    x, y = batches[0]
    with torch.no_grad():
        assert value == pytest.approx((trainer.model(x).argmax(1) == y).float().mean().item())
