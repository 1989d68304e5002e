import weakref

import pytest
import torch
from small_runs import make_trainer
from torch import nn

from hookline.engine.modeling import ModelAdapter
from hookline.hooks import CallbackHook, HookBase


class Seen(HookBase):
    """Records the batch and outputs at two events."""

    uses_outputs = True

    def __init__(self):
        self.forward, self.step = [], []

    def after_forward(self, batch, outputs):
        assert self.trainer.batch is batch
        self.forward.append(self.trainer.outputs.shape)

    def after_step(self):
        x, _ = self.trainer.batch
        self.step.append((len(x), weakref.ref(self.trainer.outputs)))


def make(*hooks, compiled=False, **options):
    model = nn.Linear(4, 2)
    if compiled:
        model.compile(backend="eager")
    batches = [(torch.randn(6, 4), torch.tensor([0, 1] * 3))] * 3
    return make_trainer(*hooks, model=model, data=batches, adapter=ModelAdapter(nn.CrossEntropyLoss()), **options)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_hook_that_asks_sees_the_last_micro_batch_until_the_step_ends(compiled, micro_batches):
    trainer, size = make(seen := Seen(), compiled=compiled, accumulation_steps=micro_batches), 6 // micro_batches
    trainer.train(0, 2)
    assert seen.forward == [(size, 2)] * 2 * micro_batches
    assert [length for length, _ in seen.step] == [size, size]
    assert [outputs() for _, outputs in seen.step] == [None, None]


def test_they_must_be_asked_for():
    trainer = make(Seen())
    trainer.remove_hook(Seen)
    trainer.register_hooks([CallbackHook(after_step=lambda trainer: trainer.outputs)])
    with pytest.raises(AttributeError, match="uses_outputs = True"):
        trainer.train(0, 1)
