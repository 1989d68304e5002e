import torch
from torch import nn
from torch.utils.data import TensorDataset

from hookline.engine import Trainer
from hookline.hooks import HookBase


class Puts(HookBase):
    def __init__(self):
        self.events = []

    def put(self, event):
        self.events.append(event)
        self.trainer.storage.put_scalar("seen", 1.0)

    def before_eval(self):
        self.put("before_eval")

    def after_eval(self, results):
        self.put("after_eval")

    def before_predict(self):
        self.put("before_predict")

    def after_predict(self, results):
        self.put("after_predict")


def test_hooks_may_put_metrics_in_an_evaluation_or_prediction_outside_of_training(tmp_path):
    data = TensorDataset(torch.randn(4, 2), torch.randn(4, 1))
    hook = Puts()
    trainer = Trainer(nn.Linear(2, 1), test_data=data, loss=nn.MSELoss(), hooks=[hook], output_dir=tmp_path)
    trainer.evaluate()
    trainer.predict()
    assert hook.events == ["before_eval", "after_eval", "before_predict", "after_predict"]
