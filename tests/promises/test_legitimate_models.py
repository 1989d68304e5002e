"""Models, losses and hooks that people pass to ``Trainer(...)``: all of them train as they are."""

import numpy as np
import pytest
import torch
from legitimate import Trainer, check, merged, usual
from torch import nn
from torch.nn import functional as F

import hookline
from hookline.hooks import EMA, CallbackHook, EarlyStopping


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x)


class NetWithLoss(Net):
    """Returns scores and loss, as models of transformers do."""

    def forward(self, x, targets=None):
        scores = self.layer(x)
        return scores, None if targets is None else F.cross_entropy(scores, targets)


def named_terms(scores, targets):
    return {"loss_class": F.cross_entropy(scores, targets), "loss_size": 0.1 * scores.pow(2).mean()}


def stacked(samples):
    return tuple(map(torch.stack, zip(*samples, strict=True)))


def one_call(**arguments):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(32, 8, generator=generator), torch.randint(4, (32,), generator=generator)
    usual = {"model": Net, "loss": nn.CrossEntropyLoss(), "length": 4, "batch_size": 8, "seed": 1, "output_dir": "out"}
    return hookline.Trainer(train_data=data, test_data=data, **{**usual, **arguments}).train()


CALLS = {
    "a model that returns logits and loss": {"model": NetWithLoss, "loss": None, "metrics": ["Accuracy"]},
    "a loss with named terms": {"loss": named_terms},
    "a function in the config": {"loss": None, "config": {"MODEL.LOSS": named_terms}},
    "a class in the config": {"config": {"SOLVER.OPTIMIZER.NAME": torch.optim.Adam}},
    "a function that makes batches": {"config": {"DATALOADER.COLLATE_FN": stacked}},
    "a function that orders samples": {"config": {"DATALOADER.SAMPLER_TRAIN": lambda size: range(size)}},
    "hooks in the config": {
        "config": {"HOOKS": [{"NAME": EarlyStopping, "ARGS": {"metric": "loss", "patience": 9}}, CallbackHook()]}
    },
    "two averages": {"hooks": [EMA(0.9), EMA(0.99)]},
    "one hook and one metric": {"hooks": EMA(0.9), "metrics": "Accuracy"},
    "numbers of numpy": {"length": np.int64(4), "lr": np.float32(0.1), "config": {"SOLVER.MOMENTUM": np.float64(0.5)}},
    "early stopping by a lambda": {
        "hooks": [EarlyStopping(lambda metrics: metrics["test/loss"], patience=9, mode="min")],
        "eval_period": 2,
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_one_call_trains(name, args):
    result = one_call(**CALLS[name])
    assert result.metrics.keys() >= ({"loss_class", "loss_size"} if named_terms in CALLS[name].values() else set())
    check(result)


def test_gives_hook_objects_to_a_second_trainer(args):
    hooks = [EMA(0.9), CallbackHook(after_step=lambda trainer: None)]
    one_call(hooks=hooks)
    check(one_call(hooks=hooks))


def test_evaluates_after_the_training(args):
    usual(args)
    args.opts += ["DATASETS.TEST", [{"NAME": "synthetic", "ARGS": {"size": 16}}], "TEST.METRICS", ["Accuracy"]]
    cfg = merged(args)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    check(trainer.train())
    assert "accuracy" in str(Trainer.test(cfg, trainer.model))
