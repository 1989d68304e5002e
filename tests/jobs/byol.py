"""Learn features without labels (BYOL): two views of each image, and a target network that is an average."""

import copy

import torch
from given import scans
from torch import nn
from torch.nn import functional as F

from hookline import Trainer
from hookline.hooks import HookBase


def head(inputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Flatten(), head(256))
        self.predictor = head(32)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, batch):
        x, _ = batch
        if not self.training:
            return self.online(x)
        first, second = (x + 0.1 * torch.randn_like(x), x.flip(-1))
        pairs = ((self.predictor(self.online(a)), self.target(b)) for a, b in ((first, second), (second, first)))
        return {"loss": sum(2 - 2 * F.cosine_similarity(found, wanted).mean() for found, wanted in pairs)}


class MoveTarget(HookBase):
    def after_step(self):
        model = self.trainer.model
        torch._foreach_lerp_(list(model.target.parameters()), list(model.online.parameters()), 0.01)


trainer = Trainer(
    BYOL, scans(128), optimizer="AdamW", lr=1e-3, length="8ep", batch_size=32, hooks=[MoveTarget()], seed=1,
    output_dir="output/byol",
)  # fmt: skip
trainer.train()
features = trainer.predict(scans(16))
