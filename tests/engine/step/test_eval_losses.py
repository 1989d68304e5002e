"""``trainer.eval_losses(batch, outputs)`` in ``after_eval_step``."""

import pytest
import torch
from torch import nn

from hookline import Trainer
from hookline.hooks import HookBase

X, Y = torch.randn(10, 4), torch.arange(10) % 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


class Two(Net):
    def forward(self, x):
        return {"scores": self.layer(x), "norm": x.norm()}


class OwnLoss(Net):
    """Returns its loss in training mode, in eval mode only beside the scores."""

    beside = False

    def forward(self, batch):
        scores = self.layer(batch[0])
        loss = {"loss": nn.functional.cross_entropy(scores, batch[1])}
        return {**loss, "scores": scores} if self.beside else loss if self.training else scores


class LossBeside(OwnLoss):
    beside = True


def two_outputs(prediction, norm, target):
    return nn.functional.cross_entropy(prediction, target) + 0 * norm, len(target)


def number(predictions, targets):
    return {"number": len(targets)}


class Losses(HookBase):
    def __init__(self):
        self.losses = []

    def before_eval(self):
        self.losses.clear()

    def after_eval_step(self, batch, outputs):
        self.losses.append(float(self.trainer.eval_losses(batch, outputs)["loss"]))


@pytest.mark.parametrize(
    ("model", "loss", "mapping"),
    [
        (Net, nn.CrossEntropyLoss(), {}),
        (Two, nn.CrossEntropyLoss(), {"scores": "input"}),
        (Two, two_outputs, {"scores": "prediction", "norm": "norm"}),
        (OwnLoss, None, {}),
        (LossBeside, None, {}),
    ],
)
def test_a_hook_can_read_the_loss_of_a_test_batch(model, loss, mapping, tmp_path):
    config = {"MODEL.DEVICE": "cpu", "LOG.WRITERS": [], "LOG.PROGRESS_BAR": False, "MODEL.OUTPUT_MAPPING": mapping}
    metrics = [number] if loss is two_outputs else ["Loss"]
    options = {"length": 2, "batch_size": 5, "lr": 0.1, "output_dir": tmp_path, "config": config}
    trainer = Trainer(model(), (X, Y), (X, Y), loss=loss, metrics=metrics, hooks=[hook := Losses()], **options)
    results = trainer.train().metrics
    assert len(hook.losses) == 2
    expected = nn.functional.cross_entropy(trainer.model.layer(X), Y).item()
    assert sum(hook.losses) / 2 == pytest.approx(expected, rel=1e-5)
    assert "test/loss" not in results or results["test/loss"] == pytest.approx(expected, rel=1e-5)
    trainer.evaluate()
    assert len(hook.losses) == 2
