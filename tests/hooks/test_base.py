"""Events, and what a hook may use of the trainer."""

import inspect

import torch
from torch import nn

from hookline.engine import SimpleTrainer
from hookline.hooks import EVENTS, STEP_EVENTS, HookBase
from hookline.hooks.hook_list import overrides
from hookline.hooks.trainer_view import RanksView, TrainerView

ONLY_IN_DEFAULT_TRAINER = {"cfg", "scheduler", "checkpointer", "evaluate"}
ONLY_IN_A_STEP = {"batch", "outputs", "sample_indices"}


def members(protocol):
    return {name for name in {*vars(protocol), *protocol.__annotations__} if not name.startswith("_")}


def test_events_are_the_methods_of_hook_base():
    methods = {name for name, _ in inspect.getmembers(HookBase, inspect.isfunction)}
    assert methods - {"state_dict", "load_state_dict", "reset_state"} == set(EVENTS)
    assert len(EVENTS) == len(set(EVENTS))
    assert set(STEP_EVENTS) < set(EVENTS)


def test_the_base_class_does_nothing_at_any_event():
    hook = HookBase()
    assert not any(overrides(hook, event) for event in EVENTS)
    assert hook.before_step() is None
    assert hook.state_dict() == {}


class Model(nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).sum()}


def test_a_trainer_has_everything_that_hooks_may_use():
    model = Model(1, 1)
    trainer = SimpleTrainer(model, [torch.ones(1, 1)], torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(0, 1)
    assert (
        not {name for name in members(TrainerView) if not hasattr(trainer, name)}
        - ONLY_IN_DEFAULT_TRAINER
        - ONLY_IN_A_STEP
    )
    assert not {name for name in members(RanksView) if not hasattr(trainer.comm, name)}
