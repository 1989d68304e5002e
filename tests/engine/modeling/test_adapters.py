from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hookline.engine.modeling import ModelAdapter


@dataclass
class Output:
    loss: torch.Tensor


class Returns(nn.Module):
    """A model that returns what it was made with."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, batch):
        return self.output


def test_with_a_loss_batches_are_pairs():
    model = nn.Linear(3, 2)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    adapter = ModelAdapter(nn.CrossEntropyLoss())
    losses = adapter.losses(model, (x, y))
    assert list(losses) == ["loss"]
    assert torch.equal(losses["loss"], nn.functional.cross_entropy(model(x), y))
    for batch in ((x, y), [x, y], (x,), x):
        assert torch.equal(adapter.predict(model, batch), model(x))
    assert adapter.targets((x, y)) is y


def test_without_a_loss_the_model_is_given_the_whole_batch():
    model = nn.Identity()
    batch = {"image": torch.zeros(2)}
    assert ModelAdapter().predict(model, batch) is batch


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (torch.tensor(1.0), ["total_loss"]),
        ({"cls": torch.tensor(1.0), "box": torch.tensor(2.0)}, ["cls", "box"]),
        (Output(torch.tensor(1.0)), ["loss"]),
    ],
)
def test_model_may_return_its_losses_in_several_forms(output, names):
    assert list(ModelAdapter().losses(Returns(output), None)) == names


@pytest.mark.parametrize(
    ("output", "described"),
    [
        (torch.zeros(4, 10), r"a tensor of shape \(4, 10\)"),
        ({"loss": 1.0}, "a dict {'loss': a float}"),
        ({}, "a dict {}"),
        (None, "a NoneType"),
        ((torch.zeros(()), 2), "a tuple of 2"),
    ],
)
def test_other_outputs_are_described_in_the_error(output, described):
    with pytest.raises(TypeError, match=described):
        ModelAdapter().losses(Returns(output), None)


@pytest.mark.parametrize("batch", [torch.zeros(2), (1, 2, 3), {"x": 1}])
def test_batch_that_is_no_pair_is_an_error_naming_the_key(batch):
    with pytest.raises(TypeError, match=r"MODEL\.LOSS"):
        ModelAdapter(nn.MSELoss()).losses(nn.Identity(), batch)


def test_loss_without_reduction_is_an_error():
    with pytest.raises(TypeError, match="scalar"):
        ModelAdapter(nn.MSELoss(reduction="none")).losses(nn.Identity(), (torch.zeros(2), torch.zeros(2)))
