"""TEST.PRECISION: autocast of evaluation and prediction."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hookline import Trainer
from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultPredictor

DATA = (torch.randn(10, 4), torch.arange(10) % 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen = []

    def forward(self, x):
        self.seen.append((self.training, (y := self.layer(x)).dtype))
        return y


@dataclass
class Output:
    logits: torch.Tensor
    classes: torch.Tensor


class OwnLoss(Net):
    def forward(self, batch):
        y = super().forward(batch[0])
        return {"loss": nn.functional.cross_entropy(y, batch[1])} if self.training else Output(y, y.argmax(1))


def make(tmp_path, precision, model=Net, loss=nn.CrossEntropyLoss(), amp=False):  # noqa: B008
    return Trainer(
        model(),
        DATA,
        DATA,
        loss=loss,
        metrics=["Loss"],
        length=2,
        batch_size=5,
        lr=0.1,
        output_dir=tmp_path,
        seed=1,
        config={
            **{"MODEL.DEVICE": "cpu", "LOG.WRITERS": [], "LOG.PROGRESS_BAR": False},
            **{"TEST.PRECISION": precision, "SOLVER.AMP.ENABLED": amp},
        },
    )


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("precision", ["", "bfloat16"])
def test_evaluation_and_prediction_run_in_it_and_training_does_not(tmp_path, precision, amp):
    trainer = make(tmp_path, precision, amp=amp)
    trainer.train()
    outputs = trainer.predict(DATA)
    dtypes = {True: torch.bfloat16, False: torch.float32}
    assert set(trainer.model.seen) == {(True, dtypes[amp]), (False, dtypes[bool(precision)])}
    assert outputs.dtype is torch.float32
    assert torch.equal(outputs, outputs.bfloat16().float()) is bool(precision)
    loss = nn.functional.cross_entropy(outputs, DATA[1]).item()
    assert trainer.evaluate()["test"]["loss"] == pytest.approx(loss, rel=1e-6)


def test_losses_and_outputs_of_a_model_with_its_own(tmp_path):
    trainer = make(tmp_path, "bfloat16", OwnLoss, None)
    trainer.evaluate()
    assert {dtype for _, dtype in trainer.model.seen} == {torch.bfloat16}
    output = trainer.adapter.predict(trainer.model.eval(), DATA)
    assert (output.logits.dtype, output.classes.dtype) == (torch.float32, torch.int64)


def test_the_predictor_uses_it(tmp_path):
    trainer = make(tmp_path, "bfloat16")
    torch.save(trainer.model.state_dict(), tmp_path / "weights.pth")
    cfg = trainer.cfg.clone()
    cfg.defrost()
    cfg.MODEL.WEIGHTS = str(tmp_path / "weights.pth")
    predict = DefaultPredictor(cfg)
    assert predict.batch(DATA[0]).dtype is torch.float32
    assert predict.model.seen[-1] == (False, torch.bfloat16)


def test_other_values_are_refused():
    with pytest.raises(ConfigError, match=r"TEST.PRECISION: 'bf16' is not one of"):
        get_cfg().merge_from_list(["TEST.PRECISION", "bf16"])
