"""Frozen layers: what is frozen, until when, and after a resume."""

import pytest
import torch
from small_runs import Weights, assert_equal_models, config_trainer, kill_at
from torch import nn
from torch.nn import functional as F

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.hooks import CallbackHook, EvalHook, ModelFreezer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, batch):
        return {"loss": F.cross_entropy(self.head(self.body(batch[0]).relu()), batch[1])}


def trainer_of(*hooks, model=None):
    torch.manual_seed(0)
    model = model or Net()
    data = [(torch.randn(6, 3) + 2, torch.arange(6) % 2) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    trainer = SimpleTrainer(model, data, optimizer)
    trainer.register_hooks(hooks)
    return trainer


def moved(*hooks, steps=8, model=None):
    """For each name in the state dict, the iterations in which it changed."""
    trainer_of(*hooks, weights := Weights(), model=model).train(0, steps)
    notes = weights.seen
    return {name: [i for i in range(steps) if not torch.equal(notes[i][name], notes[i + 1][name])] for name in notes[0]}


def test_frozen_layers_are_trained_from_their_iteration_on():
    changes = moved(ModelFreezer(["body.2", "body"], until=["1ep", 6]))
    assert changes["body.0.weight"] == changes["body.1.weight"] == changes["body.1.running_mean"] == [6, 7]
    assert changes["body.1.num_batches_tracked"] == [6, 7]
    assert changes["body.2.weight"] == changes["body.2.bias"] == [4, 5, 6, 7]
    assert changes["head.weight"] == list(range(8))


def test_without_until_layers_stay_frozen_however_they_are_named():
    for name in ("bod?", ["body.0.weight", "body.0.bias", "body.1", "body.2"]):
        changes = moved(ModelFreezer(name))
        assert not any(changes[key] for key in changes if key.startswith("body")), name
        assert changes["head.bias"] == list(range(8))


def test_momentum_does_not_change_weights_frozen_during_training():
    trainer = trainer_of()
    trainer.train(0, 4)  # momentum has built up
    before = trainer.model.body[0].weight.detach().clone()
    trainer.register_hooks([ModelFreezer("body")])
    trainer.train(4, 8)
    assert torch.equal(trainer.model.body[0].weight, before)


def test_norms_stay_in_eval_mode_after_model_train():
    freezer, seen = ModelFreezer("body", until=6), []

    def evaluate():
        trainer.model.eval()
        trainer.model.train()

    look = CallbackHook(before_forward=lambda t, batch: seen.append(t.model.body[1].training))
    trainer = trainer_of(EvalHook(1, evaluate), freezer, look)
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.model.train())])
    trainer.train(0, 8)
    assert seen == [False] * 6 + [True] * 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(([],), "layers"), ((["a", "b"], ["1ep"]), "durations"), (("a", "2h"), "2h"), (("boddy",), "'body'")],
)
def test_invalid_arguments_and_unknown_names_are_errors(arguments, named):
    with pytest.raises(ConfigError, match=named):
        trainer_of(ModelFreezer(*arguments)).train(0, 1)


def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_run(tmp_path):
    def make(folder, resume=False):
        freezer = {"NAME": "ModelFreezer", "ARGS": {"layers": ["features.9", "features"], "until": [5, "2ep"]}}
        settings = ["DATASETS.TEST", [], "SOLVER.MAX_ITER", 15, "SOLVER.CHECKPOINT_PERIOD", 4, "HOOKS", [freezer]]
        return config_trainer(tmp_path / folder, *settings, resume=resume)

    make("whole").train()
    kill_at(make("run"), 9)
    make("run", resume=True).train()
    assert_equal_models(tmp_path / "run", tmp_path / "whole")
