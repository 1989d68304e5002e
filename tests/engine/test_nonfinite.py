import pytest
import torch

from hookline.config import ConfigError
from hookline.engine.nonfinite import skip_on_device
from hookline.hooks import EventStorage


def a_step(optimizer, loss):
    """The way of steps on a GPU, on this device: the optimizer looks whether it is to do something."""
    loss.backward()
    skip_on_device([optimizer], {"loss": loss})
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_optimizer_leaves_weights_alone_by_itself_where_a_loss_is_not_finite(cls):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = cls([weight], lr=0.1, fused=True)
    a_step(optimizer, (weight * torch.tensor([1.0, float("nan"), 1.0])).sum())
    assert torch.equal(weight, torch.ones(3))
    a_step(optimizer, weight.sum())
    assert (weight < 1).all()


def test_an_optimizer_that_cannot_look_is_refused():
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match=r"SOLVER\.NONFINITE_LOSS: skip needs a fused optimizer.*SGD"):
        a_step(torch.optim.SGD([weight], lr=0.1), weight.sum())


class Late:
    """A trainer whose losses were brought from a device just now."""

    def __init__(self, storage):
        self.storage = storage
        self.stopped = ""

    def request_stop(self, reason, everywhere=False):
        self.stopped = reason


@pytest.mark.parametrize("policy", ["raise", "stop", "skip"])
def test_what_is_seen_late_is_acted_upon_late(policy):
    from hookline.engine.nonfinite import NonFinitePolicy

    with EventStorage() as storage:
        storage.put_scalar("total_loss", torch.tensor(float("inf")), cur_iter=3)
        storage.latest()
        trainer = Late(storage)
        if policy == "raise":
            with pytest.raises(FloatingPointError, match="iteration 3"):
                NonFinitePolicy(policy).found_late(trainer)
        else:
            NonFinitePolicy(policy).found_late(trainer)
        assert bool(trainer.stopped) == (policy == "stop")
