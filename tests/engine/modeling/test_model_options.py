import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.config import ConfigError, get_cfg
from hookline.engine import comm
from hookline.engine.modeling import GPT, MLP, ConvNet, ModelAdapter, build_model
from hookline.engine.modeling.model_options import apply_model_options, checkpoint_activations


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


@torch.library.custom_op("hookline_tests::attention", mutates_args=())
def attention(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Draws its own random numbers, as fused kernels of GPUs do."""
    return x * (torch.rand(x.shape) > dropout_p) if dropout_p else x.clone()


attention.register_autograd(
    lambda ctx, grad: (grad * (ctx.saved_tensors[0] != 0), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Attending(nn.Module):
    """Has products and statistics before, and random numbers after an attention."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x, scale):
        x = attention(self.norm(self.linear(x.mean(2)).relu()), 0.5)
        return scale * nn.functional.dropout(attention(x, 0.0), 0.5)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.gpt, self.attending = GPT(16, 8, 8, depth=2, heads=2, dropout=0.1), Attending()

    def forward(self, tokens):
        return self.attending(self.gpt(tokens), scale=0.5)


class Calls(TorchDispatchMode):
    """Counts the matrix products and attentions of forward and backward."""

    def __init__(self):
        super().__init__()
        self.counts = {"matmul": 0, "attention": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts["matmul"] += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        self.counts["attention"] += "attention" in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("keep", "patterns"),
    [
        (["matmul"], ["TransformerBlock", "Attending"]),
        (["attention"], ["Transformer*", "attending"]),
        (["matmul", "attention"], ["gpt.blocks.0", "gpt.b*.1", "attending"]),
    ],
)
def test_kept_results_are_not_computed_again_and_nothing_else_changes(keep, patterns):
    torch.manual_seed(0)
    models = {"plain": Both()}
    models |= {name: copy.deepcopy(models["plain"]) for name in ("all", "some")}
    checkpoint_activations(models["all"], patterns)
    checkpoint_activations(models["some"], patterns, keep=keep)
    results, counts = [], {}
    for name, model in models.items():
        torch.manual_seed(1)
        with Calls() as calls:
            model(torch.arange(16).view(2, 8)).square().sum().backward()
        results.append([*(p.grad for p in model.parameters()), *model.buffers()])
        counts[name] = calls.counts
        assert model.state_dict().keys() == models["plain"].state_dict().keys()
        assert [type(module) for module in model.modules()] == [type(module) for module in models["plain"].modules()]
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))
    again = counts["plain"]["attention"] + 1  # the one with dropout is computed again
    for word in ("matmul", "attention"):
        expected = counts["all"][word] if word not in keep else again if word == "attention" else counts["plain"][word]
        assert counts["some"][word] == expected


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
