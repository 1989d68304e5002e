import weakref

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.engine.modeling import ModelAdapter
from hookline.hooks import EvalHook, HookBase, on


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
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SimpleTrainer(model, batches, sgd, adapter=ModelAdapter(nn.CrossEntropyLoss()), **options)
    trainer.register_hooks(hooks)
    return trainer


@pytest.mark.parametrize("compiled", [False, True])
def test_a_hook_that_asks_sees_the_batch_and_the_outputs_until_the_step_ends(compiled):
    trainer = make(seen := Seen(), compiled=compiled)
    trainer.train(0, 2)
    assert seen.forward == [(6, 2), (6, 2)]
    assert [size for size, _ in seen.step] == [6, 6]
    assert [outputs() for _, outputs in seen.step] == [None, None]


def test_with_accumulation_they_are_those_of_a_micro_batch():
    trainer = make(seen := Seen(), accumulation_steps=3)
    trainer.train(0, 1)
    assert seen.forward == [(2, 2)] * 3
    assert [size for size, _ in seen.step] == [2]


def test_an_evaluation_in_the_step_does_not_replace_them():
    trainer = make()
    evaluate = EvalHook(1, lambda: {"mean": trainer.model(torch.zeros(1, 4)).mean().item()})
    shapes = []

    @on("after_step", trainer=trainer, uses_outputs=True)
    def look(trainer):
        shapes.append(trainer.outputs.shape)

    trainer.register_hooks([evaluate])
    trainer.train(0, 2)
    assert shapes == [(6, 2), (6, 2)]


def test_they_are_released_after_an_error():
    class Fails(Seen):
        def after_forward(self, batch, outputs):
            raise ValueError("bad")

    trainer = make(Fails())
    with pytest.raises(ValueError, match="bad"):
        trainer.train(0, 2)
    assert "outputs" not in vars(trainer)


def test_without_a_hook_that_asks_the_step_is_unchanged_and_an_error_says_how_to_ask():
    trainer = make(Seen())
    trainer.remove_hook(Seen)
    assert not trainer.model._forward_hooks
    assert "forward" not in vars(trainer)

    @on("after_step", trainer=trainer)
    def look(trainer):
        return trainer.outputs

    with pytest.raises(AttributeError, match="uses_outputs = True"):
        trainer.train(0, 1)


def test_a_run_step_without_forward_is_named():
    class Own(SimpleTrainer):
        def run_step(self):
            self.fetch()

    trainer = Own(nn.Linear(1, 1), [torch.zeros(1)], torch.optim.SGD([torch.zeros(1)], lr=0.1))
    trainer.register_hooks([Seen()])
    with pytest.raises(AttributeError, match=r"Own.run_step\(\) does not call self.forward"):
        trainer.train(0, 1)


def test_a_compiled_step_refuses_them():
    with pytest.raises(ConfigError, match="COMPILE_STEP: the hook Look uses the model's outputs"):
        make(type("Look", (HookBase,), {"uses_outputs": True})(), compile_step=True)
