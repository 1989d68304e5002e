"""Small models and runs that several test files use."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer, seed_all_rng
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.evaluation import DatasetEvaluator
from hookline.hooks import CallbackHook, HookBase


class Net(nn.Module):
    """One linear layer. Its loss is the mean square of the outputs."""

    def __init__(self, inputs=2, outputs=1):
        super().__init__()
        self.fc = nn.Linear(inputs, outputs)

    def forward(self, x):
        return {"loss": self.fc(x).pow(2).mean()}


class Gan(nn.Module):
    """A generator and a critic of batches (real samples, ...). The optimizer's name says whose loss is wanted."""

    def __init__(self, size=3):
        super().__init__()
        self.generator, self.critic = nn.Linear(2, size), nn.Linear(size, 1)

    def forward(self, batch, optimizer=None):
        real = batch[0]
        fake = self.generator(real[:, :2])  # no noise: ranks would draw different one
        if optimizer == "generator":
            return {"loss": softplus(-self.critic(fake)).mean()}
        return {"fake": softplus(self.critic(fake.detach())).mean(), "real": softplus(-self.critic(real)).mean()}


class Collect(DatasetEvaluator):
    """Collects inputs and outputs; its result is the number of batches."""

    def __init__(self, name="all"):
        self.name = name
        self.seen = ["stale"]

    def reset(self):
        self.seen = []

    def process(self, inputs, outputs):
        self.seen.append((inputs, outputs))

    def evaluate(self):
        return {self.name: {"batches": len(self.seen)}}


class Classifier(nn.Module):
    """The loss of a batch (x, y) while training, scores otherwise. Batch norm, tied weights, a buffer not saved."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, batch):
        x, y = batch
        scores = self.second(self.first(self.norm(x)))
        return {"loss": cross_entropy(scores, y)} if self.training else scores


def labelled_batches(count=4, size=6, seed=0):
    """Batches of a ``Classifier``."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, generator=generator) + 1, torch.arange(size) % 4) for _ in range(count)]


def make_trainer(*hooks, model=None, data=None, lr=0.1, **options):
    """A trainer with hooks, by default of a seeded ``Classifier`` and four batches per epoch."""
    if model is None:
        torch.manual_seed(0)
        model = Classifier()
    data = labelled_batches() if data is None else data
    trainer = SimpleTrainer(model, data, torch.optim.SGD(model.parameters(), lr=lr), **options)
    trainer.register_hooks(hooks)
    return trainer


def train_net(steps, *hooks, start=0, device="cpu"):
    """Train a ``Net`` with some hooks; return the trainer."""
    trainer = make_trainer(*hooks, model=Net(8, 8).to(device), data=[torch.randn(4, 8, device=device)])
    trainer.train(start, steps)
    return trainer


def batches(count=4, size=2):
    """The same random batches (size, 3) at each call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(size, 3, generator=generator) for _ in range(count)]


def net_trainer(loader=None, cls=SimpleTrainer, hooks=(), **options):
    """Return a trainer of a ``Net`` with the same weights at each call."""
    torch.manual_seed(0)
    model = Net(3, 2).to(options.get("device", "cpu"))
    trainer = cls(model, batches() if loader is None else loader, torch.optim.SGD(model.parameters(), 0.1), **options)
    trainer.register_hooks(hooks)
    return trainer


class TimmLike:
    """A scheduler with the interface of timm's: it is told the numbers of epochs and updates."""

    def __init__(self, optimizer, t_initial: int = 1, t_in_epochs: bool = True):
        self.optimizer, self.t_initial, self.t_in_epochs, self.calls = optimizer, t_initial, t_in_epochs, []

    def step(self, epoch, metric=None):
        self.calls.append(("epoch", epoch))
        self._set(epoch, self.t_in_epochs)

    def step_update(self, num_updates, metric=None):
        self.calls.append(("update", num_updates))
        self._set(num_updates, not self.t_in_epochs)

    def _set(self, t, counts):
        if counts:
            self.optimizer.param_groups[0]["lr"] = 1 / (1 + t)

    def state_dict(self):
        return {"calls": list(self.calls)}

    def load_state_dict(self, state_dict):
        self.calls = list(state_dict["calls"])


def weights_of(model):
    """A copy of a model's weights and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Weights(HookBase):
    """Notes the weights before training and after each step."""

    def __init__(self):
        self.seen = []

    def before_train(self):
        self.seen.append(weights_of(self.trainer.model))

    after_step = before_train


def assert_same(weights, others):
    torch.testing.assert_close(dict(weights), dict(others), rtol=0, atol=0)


# ---------------------------------------------------------------------- checkpoints


def seeded_net(seed=0):
    """A linear layer and batch norm, with weights from a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def same(one, other):
    """Whether two modules or state dicts have the same names and values."""
    one, other = (part.state_dict() if isinstance(part, nn.Module) else part for part in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


class Attack:
    """An object whose pickle makes a folder where it is read."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


class Counter:
    """An object with a state."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def checkpointed_trainer(folder):
    """Return a trainer with four batches per epoch, and its checkpointer."""
    torch.manual_seed(0)
    model = Net()
    trainer = SimpleTrainer(model, [torch.ones(1, 2)] * 4, torch.optim.SGD(model.parameters(), lr=0.1))
    folder.mkdir(exist_ok=True)
    return trainer, Checkpointer(model, str(folder), trainer=trainer)


def files(checkpointer):
    return sorted(path.name for path in Path(checkpointer.save_dir).iterdir())


def saved(checkpointer, name):
    return load(Path(checkpointer.save_dir), name)


def last(checkpointer):
    return Path(checkpointer.save_dir, "last_checkpoint").read_text()


def load(folder, name="model_final"):
    return torch.load(folder / f"{name}.pth", weights_only=True)


# ---------------------------------------------------------------------- runs of a config


def mlp_config(folder, *overrides):
    """Return the config of a short run of an MLP, without writers; overrides are keys and values."""
    cfg = get_cfg()
    cfg.MODEL.NAME, cfg.MODEL.LOSS.NAME = "MLP", "CrossEntropyLoss"
    cfg.merge_from_list(["MODEL.ARGS", {"in_features": 8, "num_classes": 4}])
    cfg.DATASETS.TRAIN = ("synthetic",)
    cfg.SOLVER.MAX_ITER = 5
    cfg.LOG.WRITERS = []
    cfg.OUTPUT_DIR = str(folder)
    cfg.merge_from_list(list(overrides))
    return cfg


def trainer_of(cfg, resume=False):
    """Return the trainer of a config, as a new process makes it."""
    seed_all_rng(cfg.SEED)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    return trainer


def solver_config(**keys):
    """Return the default config with keys of ``SOLVER``."""
    cfg = get_cfg()
    cfg.merge_from_other_cfg({"SOLVER": keys})
    return cfg


SMALL_IMAGES = {"shape": (1, 4, 4), "size": 40}


def config_trainer(folder, *overrides, resume=False):
    """Return a trainer of a small ConvNet with dropout and batch norm."""
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            *("MODEL.NAME", "ConvNet", "MODEL.DEVICE", "cpu", "MODEL.LOSS.NAME", "CrossEntropyLoss"),
            *("MODEL.ARGS", {"width": 2, "num_classes": 4, "dropout": 0.3}),
            *("DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": SMALL_IMAGES}]),
            *("DATASETS.TEST", [{"NAME": "synthetic", "ARGS": {**SMALL_IMAGES, "seed": 1}}]),
            *("TEST.METRICS", ["Accuracy", "Loss"], "DATALOADER.BATCH_SIZE", 8, "SOLVER.BASE_LR", 0.1),
            *("SOLVER.CHECKPOINT_PERIOD", 7, "LOG.WRITERS", [], "SEED", 3, "OUTPUT_DIR", str(folder), *overrides),
        ]
    )
    return trainer_of(cfg, resume)


class Killed(BaseException):
    """Simulates a kill."""


def kill_at(trainer, iteration):
    """Train until an iteration, as if the process were killed there."""

    def kill(t):
        if t.iter == iteration:
            raise Killed

    trainer.register_hooks([CallbackHook(before_step=kill)])
    with pytest.raises(Killed):
        trainer.train()


def assert_equal_models(folder, other):
    """Assert that two runs ended with the same weights, bit for bit."""
    ours, theirs = load(folder)["model"], load(other)["model"]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
