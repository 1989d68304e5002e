import copy

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine import comm
from hookline.engine.modeling import MLP, ConvNet, ModelAdapter, build_model, checkpoint_activations
from hookline.engine.modeling.model_options import apply_model_options


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


def train(model):
    """Return losses, gradients and buffers after two steps."""
    torch.manual_seed(1)
    losses = [model(torch.randn(2, 1, 8, 8)) for _ in range(2)]
    sum(losses).backward()
    return [*losses, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("patterns", [["Block"], ["blocks.0", "stem"], ["Conv*", "blocks.*.norm"]])
def test_gradients_statistics_and_names_are_equal(patterns):
    torch.manual_seed(0)
    plain = Dropping()
    checkpointed = copy.deepcopy(plain)
    checkpoint_activations(checkpointed, patterns)
    for expected, found in zip(train(plain), train(checkpointed), strict=True):
        assert torch.equal(expected, found)
    assert checkpointed.state_dict().keys() == plain.state_dict().keys()
    assert [type(m) for m in checkpointed.modules()] == [type(m) for m in plain.modules()]


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


def test_a_copy_runs_its_own_weights():
    model = MLP(4, 2)
    checkpoint_activations(model, ["Linear"])
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    other(torch.randn(3, 4)).sum().backward()
    assert not other(torch.randn(3, 4)).any()
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in model.parameters())


# ---------------------------------------------------------------------------- MODEL.SYNC_BATCHNORM


def test_several_processes_on_gpus_convert_all_batch_norms_and_keep_names(monkeypatch):
    cfg = get_cfg()
    cfg.MODEL.NAME, cfg.MODEL.DEVICE, cfg.MODEL.SYNC_BATCHNORM = "ConvNet", "cpu", True
    plain = build_model(cfg)  # one process converts nothing
    assert not any(isinstance(module, nn.SyncBatchNorm) for module in plain.modules())
    names = list(plain.state_dict())
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    model = apply_model_options(cfg, plain, torch.device("cuda"))
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 4
    assert all(isinstance(norm, nn.SyncBatchNorm) for norm in norms)
    assert list(model.state_dict()) == names
    with pytest.raises(ConfigError, match=r"MODEL\.SYNC_BATCHNORM.*GPU"):
        build_model(cfg)


def test_the_next_step_does_not_overwrite_the_losses_of_a_compiled_model():
    kept = torch.zeros(())

    class Reusing(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                kept.copy_(super().forward(x).sum())
            return {"loss": kept}

    model, adapter = Reusing(2, 1), ModelAdapter()
    model.compile(backend="eager")
    first = adapter.losses(model, torch.ones(1, 2))["loss"]
    before = first.item()
    adapter.losses(model, torch.full((1, 2), 3.0))
    assert first.item() == before != kept.item()


@pytest.mark.parametrize("key", ["SYNC_BATCHNORM", "CHANNELS_LAST"])
def test_an_option_that_does_nothing_for_a_model_is_a_warning(key, log):
    cfg = get_cfg()
    cfg.MODEL[key] = True
    apply_model_options(cfg, nn.Linear(2, 2), torch.device("cpu"))
    assert f"MODEL.{key} does nothing: Linear has no" in log.text
