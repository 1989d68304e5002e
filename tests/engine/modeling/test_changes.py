import copy
import pickle
import sys
import types

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine.modeling import MLP, ConvNet, ResNet, check_model, checkpoint_activations
from hookline.engine.modeling.changes import _to_float8, check_float8


class Dropping(nn.Module):
    """Has random numbers, statistics and a keyword argument, which a second run could change."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x, scale):
        return scale * nn.functional.dropout(self.norm(self.conv(x)).relu(), 0.3, self.training)


def train(model, steps=2):
    """Return losses, gradients and buffers after two steps."""
    torch.manual_seed(1)
    left = []
    for _ in range(steps):
        loss = model(torch.randn(2, 1, 8, 8))
        loss.backward()
        left.append(loss.detach())
    return [*left, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("patterns", [["blocks.*"], ["Block"], ["blocks.0", "stem"], ["*"], ["blocks.*.norm"]])
def test_gradients_and_statistics_are_bitwise_equal(patterns):
    torch.manual_seed(0)
    plain = Dropping()
    checkpointed = copy.deepcopy(plain)
    if patterns == ["*"]:
        patterns = ["Conv*", "Block"]
    checkpoint_activations(checkpointed, patterns)
    for expected, found in zip(train(plain), train(checkpointed), strict=True):
        assert torch.equal(expected, found)


def test_activations_are_not_kept():
    def kept(model):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            model(torch.randn(4, 1, 8, 8)).sum()
        return sum(sizes)

    plain = ConvNet(width=4)
    checkpointed = copy.deepcopy(plain)
    checkpoint_activations(checkpointed, ["features"])
    assert kept(checkpointed) < kept(plain) / 4


def test_names_and_classes_stay():
    plain, checkpointed = ResNet(), ResNet()
    checkpoint_activations(checkpointed, ["blocks.*"])
    assert checkpointed.state_dict().keys() == plain.state_dict().keys()
    assert [type(m) for m in checkpointed.modules()] == [type(m) for m in plain.modules()]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_runs_its_own_weights(copied):
    model = MLP(4, 2)
    checkpoint_activations(model, ["Linear"])
    other = copied(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    other(torch.randn(3, 4)).sum().backward()
    assert not other(torch.randn(3, 4)).any()
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_without_gradients_forward_runs_once():
    model = MLP(4, 2)
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    checkpoint_activations(model, ["Linear"])
    with torch.no_grad():
        model(torch.randn(3, 4))
    assert len(calls) == 1


def test_submodules_of_a_checkpointed_module_are_not_checkpointed_again():
    model = ResNet()
    checkpoint_activations(model, ["blocks", "_BasicBlock", "Conv2d"])
    wrapped = [name for name, child in model.named_modules() if "forward" in vars(child)]
    assert wrapped == ["stem.0", "blocks"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("block", r"MODEL\.ACTIVATION_CHECKPOINTING\[1\].*'block'.*did you mean.*Submodules: stem, blocks"),
        (
            "blocks.7",
            r"Dropping has no submodule.*blocks\.0, blocks\.1.*Classes: BatchNorm2d, Block, Conv2d, ModuleList",
        ),
        ("blocks", r"'blocks' is a ModuleList, which is never called itself; use its submodules: 'blocks\.\*'"),
    ],
)
def test_a_pattern_without_a_match_is_an_error_that_lists_the_names(pattern, message):
    with pytest.raises(ConfigError, match=message):
        checkpoint_activations(Dropping(), ["stem", pattern])


# ---------------------------------------------------------------------------- float8


def config(*options):
    cfg = get_cfg()
    sizes = "{'in_features': 8, 'num_classes': 3}"
    cfg.merge_from_list(["MODEL.NAME", "MLP", "MODEL.ARGS", sizes, "MODEL.DEVICE", "cpu", *options])
    return cfg


def test_a_cpu_is_refused_before_anything_is_built():
    with pytest.raises(ConfigError, match=r"MODEL.FLOAT8: needs a GPU of compute capability .* MODEL.DEVICE is cpu"):
        check_model(config("MODEL.FLOAT8", "rowwise"))
    check_model(config())


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ConfigError, match=r"MODEL\.FLOAT8"):
        config("MODEL.FLOAT8", "columnwise")


def with_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")


def test_an_old_gpu_is_named(monkeypatch):
    with_gpu(monkeypatch, (8, 0))
    with pytest.raises(ConfigError, match=r"and A GPU has \(8, 0\)"):
        check_float8(torch.device("cuda"))


def test_the_missing_package_is_named(monkeypatch):
    with_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package torchao: pip install"):
        check_float8(torch.device("cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: types.SimpleNamespace(name=name))
    check_float8(torch.device("cuda"))


@pytest.mark.slow  # importing torchao takes seconds
def test_layers_whose_sizes_fit_are_converted(monkeypatch):
    pytest.importorskip("torchao")
    with_gpu(monkeypatch, (9, 0))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    names, weight = list(model.state_dict()), model[0].weight
    model = _to_float8(model, "rowwise", torch.device("cuda"))
    assert [type(module).__name__ for module in model] == ["Float8Linear", "ReLU", "Linear"]
    assert list(model.state_dict()) == names
    assert model[0].weight is weight
    assert "torchao" in sys.modules
