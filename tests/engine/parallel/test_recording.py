"""A recorded construction gives the values of an ordinary one, bit for bit."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from hookline.engine.modeling import GPT, MLP, ConvNet
from hookline.engine.parallel.recording import CannotRecordError, Place, Recording
from hookline.hooks.common.rng import capture_rng


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


class Reading(nn.Module):
    """Uses values while it is built."""

    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 40)] + torch.rand(20).tolist()
        self.rates = nn.Parameter(torch.tensor(rates) + float(torch.rand(30).sum()) + random.random())
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(20, 10), std=0.5, a=-0.5, b=0.5))  # draws again
        self.turned = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
        self.wide = nn.Parameter(nn.init.orthogonal_(torch.empty(4, 7)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(8, 8), 0.5))
        chosen = torch.rand(60)
        self.chosen = nn.Parameter(chosen[chosen > 0.5])
        self.array = nn.Parameter(torch.from_numpy(torch.rand(20).numpy() + np.random.rand(20)).float())
        with torch.no_grad():
            for row in self.sparse:
                row /= row.norm() + self.cut.max().item()


class Mixed(nn.Module):
    """Writes from small to large tensors and back, to views, in other dtypes, and copies modules."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 10).half()
        self.second = copy.deepcopy(self.first)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.rnn = nn.LSTM(4, 4)
        self.frozen = nn.Parameter(torch.randn(20, generator=torch.Generator().manual_seed(5)), requires_grad=False)
        self.register_buffer("angles", torch.outer(torch.arange(10.0), 1 / torch.arange(1.0, 5.0)))
        self.register_buffer("mask", torch.ones(9, 9).tril().bool(), persistent=False)
        self.register_buffer("data", torch.tensor([1.0, 2.0]))
        self.data[0] = self.second.weight.sum().float()  # small from large
        with torch.no_grad():
            self.first.weight[2:4].copy_(self.data.half()[:, None])  # large from small
            self.data.zero_()
            self.second.weight[:, 1].normal_()
        torch.set_default_dtype(torch.float64)
        self.double = nn.Linear(4, 4)
        torch.set_default_dtype(torch.float32)


MODELS = {
    "MLP": lambda: MLP(10, 3, (20,)),
    "ConvNet": lambda: ConvNet(8).to(memory_format=torch.channels_last),
    "GPT": lambda: GPT(width=16, depth=1, heads=2, block_size=8),
    "tied": Tied,
    "reading": Reading,
    "mixed": Mixed,
}


def seeded():
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)


def equal(one, other):
    return one["python"] == other["python"] and all(
        torch.equal(a, b) for a, b in ((one["torch"], other["torch"]), (one["numpy"][1], other["numpy"][1]))
    )


@pytest.mark.parametrize("small", [0, 100])
@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_model_has_the_same_values_and_leaves_the_same_random_state(name, small):
    seeded()
    ordinary, expected = MODELS[name](), capture_rng()
    seeded()
    recording = Recording(torch.Generator().manual_seed(3).get_state(), small=small)
    with recording:
        model = MODELS[name]()
    assert equal(capture_rng(), expected)
    assert torch.equal(recording.own_state, expected["torch"])  # a generator with the same seed has drawn as much
    recorded = 0
    theirs = {**dict(ordinary.named_parameters()), **dict(ordinary.named_buffers())}
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        recorded += tensor.is_meta
        value = recording.value(Place.of(tensor.detach())) if tensor.is_meta else tensor
        assert torch.equal(value, theirs[key]), key
        assert (value.dtype, value.stride()) == (theirs[key].dtype, theirs[key].stride()), key
        assert tensor.requires_grad == theirs[key].requires_grad
    assert recorded
    assert equal(capture_rng(), expected)


def test_small_tensors_are_built_as_usual():
    with Recording(small=100) as recording:
        layer = nn.Linear(10, 5)
    assert not layer.bias.is_meta
    assert recording.holds(layer.weight)


def test_a_constructor_that_asks_for_memory_is_refused_even_if_it_catches_the_error():
    with Recording(small=0) as recording:
        weight = torch.randn(10)
        with pytest.raises(CannotRecordError):
            weight.data_ptr()
    assert recording.problem == "it calls Tensor.data_ptr"
    with Recording(small=0), pytest.raises(ValueError, match="read-only"):
        torch.randn(10).numpy()[0] = 1
