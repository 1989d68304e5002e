"""``Trainer(...)`` on a few points, as a script calls it."""

import torch
from torch import nn

from hookline.engine import Trainer
from hookline.engine.data import ArrayDataset
from hookline.hooks import get_event_storage

QUIET = {"MODEL.DEVICE": "cpu", "LOG.WRITERS": ["JSONWriter"], "LOG.PERIOD": 1, "LOG.PROGRESS_BAR": False}


class Net(nn.Module):
    """Scores of three classes."""

    def __init__(self, hidden=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, 3))

    def forward(self, x):
        return self.layers(x)


class OwnLoss(Net):
    """Computes its loss in training."""

    def forward(self, batch):
        outputs = self.layers(batch[0])
        return {"cls": nn.functional.cross_entropy(outputs, batch[1])} if self.training else outputs


class Storing(OwnLoss):
    """Puts the number of samples into the storage."""

    def forward(self, batch):
        get_event_storage().put_scalar("seen", len(batch[1]))
        return super().forward(batch)


def points(size=24, seed=0):
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return ArrayDataset(x, x[:, :3].argmax(1))


X, Y = points().tensors


def one_call(folder, model=Net, train=points, test=None, config=None, **options):
    given = {"loss": nn.CrossEntropyLoss(), "length": 6, "batch_size": 8, "seed": 1, **options}
    return Trainer(model, train, test, output_dir=folder, config={**QUIET, **(config or {})}, **given)


def trained(trainer):
    trainer.train()
    return trainer


def weights(trainer):
    return torch.cat([value.flatten() for value in trainer.model.state_dict().values()])
