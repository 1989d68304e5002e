import pytest
import torch
from torch import nn

from hookline.engine.modeling import model_summary
from hookline.engine.modeling.summary import watching_forward


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return {"out": self.norm(self.fc(self.fc(x)))}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.block(x)["out"])


def table(text):
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()}


def test_the_table_has_two_levels_with_shapes_and_flops():
    model = Net().eval()
    with watching_forward(model) as passes, torch.no_grad():
        model(torch.ones(3, 4))
        model(torch.ones(7, 4))  # only the first pass counts
    rows = table(model_summary(model, passes))
    assert rows["block"] == ["Block", "28", "[3,", "4]", "192"]
    assert rows["fc"] == ["Linear", "20", "[3,", "4]", "192"]  # called twice: 2 * 2 * 3 * 4 * 4
    assert rows["norm"] == ["BatchNorm1d", "8", "[3,", "4]"]
    assert rows["total"] == ["Net", "38", "[3,", "2]", "240"]
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())


def test_without_a_pass_there_are_no_columns_for_it():
    model = Net()
    model.head.weight.requires_grad = False
    lines = model_summary(model).splitlines()
    assert lines[0].split() == ["layer", "type", "parameters"]
    assert lines[-1].split() == ["total", "Net", "38", "(30", "trained)"]


def test_watching_changes_nothing_and_ends_with_an_error():
    model = Net()
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError), watching_forward(model):
        model(torch.ones(3, 5))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
    seen = []

    class Count(nn.Module):
        def forward(self, x):
            seen.append(torch._C._len_torch_dispatch_stack())
            return x

    Count()(torch.ones(1))
    assert seen == [0]


def test_compiled_models_are_not_watched():
    model = Net()
    model.block.compile()
    with watching_forward(model) as passes:
        assert not model.head._forward_hooks
    assert passes == {}


def test_many_layers_are_shown_in_part_and_no_line_is_too_long():
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(20)))
    assert len(model_summary(deep).splitlines()) == 22  # without the layers in them
    long = nn.Sequential(*(nn.ReLU() for _ in range(50)))
    assert "... and 20 more" in model_summary(long)
    net = nn.ModuleDict({"a_very_long_name_of_a_layer_that_takes_much_room": type("C" * 40, (nn.ReLU,), {})()})
    assert max(map(len, model_summary(net).splitlines())) <= 80
