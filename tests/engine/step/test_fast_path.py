"""Each shortcut gives the same bits as the public call, and falls back to it where the difference could be seen."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

from hookline.engine.data import ArrayDataset
from hookline.engine.data.loader import Collated, iterate
from hookline.engine.parallel import Strategy
from hookline.engine.step.fast_path import FastStep


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def loss_of(model):
    return model(torch.randn(4, 5)).pow(2).mean()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
}


def train(make, fast, scheduled):
    model = net()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if scheduled else None
    shortcuts = FastStep(Strategy())
    seen = []  # by hooks of a tensor
    model[0].weight.register_hook(seen.append)
    model[0].weight.register_post_accumulate_grad_hook(seen.append)
    for _ in range(5):
        loss = loss_of(model)
        if fast:
            shortcuts.backward(loss)
            shortcuts.step(optimizer)
            shortcuts.zero_grad(optimizer)
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        if scheduler:
            scheduler.step()
    assert len(seen) == 10
    return [*model.parameters()], str(optimizer.state_dict())


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_gives_the_same_bits(name, scheduled, recwarn):
    fast, fast_state = train(OPTIMIZERS[name], True, scheduled)
    plain, plain_state = train(OPTIMIZERS[name], False, scheduled)
    assert all(torch.equal(a, b) for a, b in zip(fast, plain, strict=True))
    assert fast_state == plain_state
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)], "the scheduler knows that step() was called"


class Own(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.seen = []

    def step(self, closure=None):
        self.seen.append("step")
        return super().step(closure)


def test_hooks_and_overridden_or_replaced_methods_are_called():
    model, seen = net(), []
    loss_of(model).backward()
    own, plain = Own(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
    fast = FastStep(Strategy())
    fast.step(own)
    assert own.seen == ["step"]
    plain.register_step_pre_hook(lambda *args: seen.append("before"))
    plain.register_step_post_hook(lambda *args: seen.append("after"))
    fast.step(plain)
    handle = register_optimizer_step_post_hook(lambda *args: seen.append("global"))
    fast.step(plain)
    handle.remove()
    plain.step = lambda: seen.append("instance")
    fast.step(plain)
    assert seen == ["before", "after", "before", "after", "global", "instance"]


class OwnLoader(DataLoader):
    def __iter__(self):
        return iter(["mine"])


PLAIN, ARRAYS = (kind(torch.arange(20.0).reshape(10, 2), torch.arange(10)) for kind in (TensorDataset, ArrayDataset))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(PLAIN, batch_size=3, shuffle=True),
        lambda: DataLoader(PLAIN, 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: DataLoader(ARRAYS, batch_size=4, collate_fn=ARRAYS.collate_fn, shuffle=True),
        lambda: DataLoader(PLAIN, batch_size=None, shuffle=True),
        lambda: DataLoader(PLAIN, batch_size=5, num_workers=1),
        lambda: OwnLoader(range(3)),
    ],
)
def test_batches_and_random_numbers_equal_the_loaders(make):
    def read(iterator_of):
        torch.manual_seed(0)
        return str(list(iterator_of(make()))), torch.rand(1).item()

    assert read(
        lambda loader: (read[0][0] if isinstance(read, Collated) else read for read in iterate(loader))
    ) == read(iter)
