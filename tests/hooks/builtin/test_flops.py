import pytest
import torch
from small_runs import Net, assert_equal_models, config_trainer, make_trainer
from torch import nn
from torch.nn import functional as F

from hookline.hooks.builtin.flops import FlopsCounter

BATCH = [torch.randn(8, 16)]
FORWARD = 2 * 8 * 16 * 32  # two operations for each multiply-add


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return F.scaled_dot_product_attention(x * self.scale, x, x, is_causal=True).mean()


@pytest.mark.parametrize(
    ("make_model", "batches", "kwargs", "flops"),
    [
        (lambda: Net(16, 32), BATCH, {"accumulation_steps": 4}, 3 * FORWARD),  # a step is three forward passes
        (lambda: torch.compile(Net(16, 32), backend="eager"), BATCH, {}, 3 * FORWARD),
        (Attention, [torch.randn(2, 3, 5, 16)], {}, 3 * 2 * (2 * 3 * 5 * 5 * (16 + 16))),  # 6 heads, 5 positions
    ],
    ids=["accumulated", "compiled", "attention"],
)
def test_the_operations_of_a_step_are_counted(make_model, batches, kwargs, flops):
    hook = FlopsCounter()
    make_trainer(hook, model=make_model(), data=batches, **kwargs).train(0, 2)
    assert hook.flops == flops


def test_flops_mfu_and_a_total_of_the_run_are_put():
    trainer = make_trainer(FlopsCounter(peak_flops=1e12), model=Net(16, 32), data=BATCH)
    trainer.train(0, 20)
    latest = trainer.storage.latest()
    assert latest["flops_per_s"][1] == 19
    assert 0 < latest["mfu"][0] < 1
    assert latest["mfu"][0] == pytest.approx(latest["flops_per_s"][0] / 1e12)
    for start, end in ((20, 30), (0, 5)):
        trainer.train(start, end)
        assert trainer.storage.latest()["total_flops"] == (end * 3 * FORWARD, end - 1)


def test_counting_does_not_change_the_run(tmp_path):
    """The model has dropout and batch norm."""
    for name, hooks in (("plain", []), ("counted", [{"NAME": "FlopsCounter"}])):
        trainer = config_trainer(tmp_path / name, "SOLVER.MAX_ITER", 6, "HOOKS", hooks)
        trainer.train()
    assert trainer.find_hook("FlopsCounter").flops > 1000
    assert_equal_models(tmp_path / "counted", tmp_path / "plain")
