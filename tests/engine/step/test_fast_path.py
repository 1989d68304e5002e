"""Each shortcut gives the same bits as the public call, and falls back to it where the difference could be seen."""

import pytest
import torch
from small_runs import Net
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

from hookline.engine import SimpleTrainer
from hookline.engine.data import ArrayDataset
from hookline.engine.data.loader import Collated, iterate
from hookline.hooks import LRScheduler

BATCHES = [*torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
}


def made(make):
    """A model and its optimizer."""
    torch.manual_seed(0)
    model = Net(8, 3)
    return model, make(model.parameters())


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_gives_the_same_bits_as_one_by_hand(name, scheduled, recwarn):
    plain, optimizer = made(OPTIMIZERS[name])
    schedule = StepLR(optimizer, 2) if scheduled else None
    for x in BATCHES:
        optimizer.zero_grad()
        plain(x)["loss"].backward()
        optimizer.step()
        if schedule:
            schedule.step()
    ours, our_optimizer = made(OPTIMIZERS[name])
    seen = []  # by hooks of a tensor
    ours.fc.weight.register_hook(seen.append)
    ours.fc.weight.register_post_accumulate_grad_hook(seen.append)
    trainer = SimpleTrainer(ours, BATCHES, our_optimizer)
    trainer.register_hooks([LRScheduler(scheduler=StepLR(our_optimizer, 2))] if scheduled else [])
    trainer.train(0, 5)
    assert len(seen) == 10
    assert all(p.grad is None for p in ours.parameters())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    assert str(our_optimizer.state_dict()) == str(optimizer.state_dict())
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)], "the scheduler knows that step() was called"


class Own(torch.optim.SGD):
    seen = ()

    def step(self, closure=None):
        self.seen += ("step",)
        return super().step(closure)


def test_hooks_and_overridden_or_replaced_methods_are_called():
    def train(model, optimizer):
        SimpleTrainer(model, BATCHES, optimizer).train(0, 1)

    model, own = made(Own)
    train(model, own)
    assert own.seen == ("step",)
    seen, (model, plain) = [], made(torch.optim.SGD)
    plain.register_step_pre_hook(lambda *args: seen.append("before"))
    plain.register_step_post_hook(lambda *args: seen.append("after"))
    train(model, plain)
    handle = register_optimizer_step_post_hook(lambda *args: seen.append("global"))
    train(model, plain)
    handle.remove()
    plain.step = lambda: seen.append("instance")
    train(model, plain)
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
