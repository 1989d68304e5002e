import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookline.engine import SimpleTrainer
from hookline.hooks import get_event_storage
from hookline.hooks.watching.flops import FlopsCounter, known_peak


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 32, bias=False)

    def forward(self, batch):
        return {"loss": self.linear(batch).square().mean()}


class Everything(nn.Module):
    """All that a forward pass can change: buffers, attributes, random numbers of all kinds, metrics."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 3)
        self.register_buffer("mean", torch.zeros(()))
        self.calls = 0

    def forward(self, batch):
        x, y = batch
        self.calls += 1
        self.mean = 0.9 * self.mean + x.mean()
        x = x + random.random() * 0.1 + np.random.rand() * 0.1
        x = F.dropout(self.norm(self.conv(x)).relu(), 0.5, self.training)
        get_event_storage().put_scalar("mean", self.mean)
        return {"loss": F.cross_entropy(self.head(x.flatten(1)), y)}


def make(model, batches, *hooks, **kwargs):
    trainer = SimpleTrainer(model, batches, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **kwargs)
    trainer.register_hooks(hooks)
    return trainer


def test_a_step_is_three_forward_passes_with_two_operations_per_multiply_add():
    hook = FlopsCounter()
    make(Linear(), [torch.randn(8, 16)], hook).train(0, 2)
    assert hook.flops == 3 * 2 * 8 * 16 * 32


def test_a_frozen_model_has_no_backward_pass():
    hook, model = FlopsCounter(), Linear()
    trainer = make(model, [torch.randn(8, 16)], hook)
    model.linear.weight.requires_grad_(False)
    trainer.backward = lambda losses: None
    trainer.train(0, 1)
    assert hook.flops == 2 * 8 * 16 * 32


def test_micro_batches_add_up_to_the_whole_batch():
    hook = FlopsCounter()
    make(Linear(), [torch.randn(8, 16)], hook, accumulation_steps=4).train(0, 2)
    assert hook.flops == 3 * 2 * 8 * 16 * 32


def test_attention_is_counted():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return F.scaled_dot_product_attention(x * self.scale, x, x, is_causal=True).mean()

    hook = FlopsCounter()
    make(Attention(), [torch.randn(2, 3, 5, 16)], hook).train(0, 1)  # 2 * 3 heads, 5 positions, 16 channels
    assert hook.flops == 3 * 2 * (2 * 3 * 5 * 5 * (16 + 16))


def test_flops_and_mfu_are_put_when_metrics_are_written():
    trainer = make(Linear(), [torch.randn(8, 16)], FlopsCounter(peak_flops=1e12))
    trainer.train(0, 20)
    latest = trainer.storage.latest()
    assert latest["flops_per_s"][1] == 19
    assert latest["mfu"][0] == pytest.approx(latest["flops_per_s"][0] / 1e12)
    assert 0 < latest["mfu"][0] < 1


def test_the_total_continues_after_a_resume_and_in_a_second_training():
    def start(state=None):
        trainer = make(Linear(), [torch.randn(8, 16)], FlopsCounter())
        if state:
            trainer.load_state_dict(state)
        return trainer

    def total(trainer):
        return trainer.storage.latest()["total_flops"]

    step = 3 * 2 * 8 * 16 * 32
    first = start()
    first.train(0, 20)
    assert total(first) == (20 * step, 19)
    resumed = start(first.state_dict())
    resumed.train(20, 30)
    assert total(resumed) == (30 * step, 29)
    resumed.train(30, 35)
    assert total(resumed) == (35 * step, 34)
    resumed.train(0, 5)
    assert total(resumed) == (5 * step, 4)


def test_without_a_known_peak_there_is_no_mfu_and_one_log_line(log):
    trainer = make(Linear(), [torch.randn(8, 16)], FlopsCounter())
    trainer.train(0, 20)
    assert "mfu" not in trainer.storage.latest()
    assert log.text.count("no MFU: give peak_flops") == 1


def test_counting_does_not_change_the_run():
    def run(*hooks):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        batches = [(torch.randn(4, 1, 8, 8), torch.randint(0, 3, (4,))) for _ in range(3)]
        model = Everything()
        trainer = make(model, batches, *hooks)
        trainer.train(0, 5)
        draws = [random.random(), np.random.rand(), torch.rand(()).item()]
        losses = {name: history.values() for name, history in trainer.storage.histories().items()}
        return model, draws, {name: losses[name] for name in ("loss", "mean")}

    hook = FlopsCounter()
    (model, draws, losses), (expected, expected_draws, expected_losses) = run(hook), run()
    assert hook.flops > 1000
    assert model.calls == expected.calls == 5
    assert draws == expected_draws
    assert losses == expected_losses
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_model_in_eval_mode_stays_in_it():
    class Freezing(Linear):
        def forward(self, batch):
            self.train()
            return super().forward(batch)

    model = Freezing()
    seen = []
    trainer = make(model, [torch.randn(8, 16)], FlopsCounter())
    model.eval()
    model.register_forward_pre_hook(lambda module, args: seen.append(module.training))
    trainer.train(0, 1)
    assert seen == [False, False]


def test_a_model_that_cannot_be_counted_is_trained(log):
    class Once(Linear):
        def forward(self, batch):
            if not torch.is_grad_enabled():
                raise ValueError("needs gradients")
            return super().forward(batch)

    trainer = make(Once(), [torch.randn(8, 16)], FlopsCounter(peak_flops=1e12))
    assert trainer.train(0, 5).reason == "completed"
    assert "flops_per_s" not in trainer.storage.latest()
    assert log.text.count("The model's FLOPs cannot be counted: ValueError: needs gradients") == 1


def test_a_compiled_model_is_counted_in_eager_mode():
    hook, model = FlopsCounter(), Linear()
    compiled = torch.compile(model, backend="eager")
    make(compiled, [torch.randn(8, 16)], hook).train(0, 2)
    assert hook.flops == 3 * 2 * 8 * 16 * 32


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA RTX A4000", None),
        ("Tesla T4", 65e12),
        ("NVIDIA T400", None),
    ],
)
def test_the_peak_of_common_gpus_is_known(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert known_peak(torch.device("cuda")) == peak
    assert known_peak(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_random_numbers_of_the_gpu_are_restored():
    def run(*hooks):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8)).cuda()
        model.forward = lambda x: {"loss": nn.Sequential.forward(model, x).square().sum()}
        trainer = make(model, [torch.ones(4, 8, device="cuda")], *hooks)
        trainer.train(0, 5)
        return model.state_dict()

    with_it, without = run(FlopsCounter()), run()
    assert all(torch.equal(with_it[name], value) for name, value in without.items())
