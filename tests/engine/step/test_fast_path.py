"""Each shortcut gives the same bits as the public call, and falls back to it where the difference could be seen."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

from hookline.engine.data import ArrayDataset
from hookline.engine.data.loader import iterate
from hookline.engine.step.fast_path import FastOptimizer, backward


def model_and_loss(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    return model, model(torch.randn(4, 5)).pow(2).mean()


def test_backward_gives_the_same_gradients():
    ours, loss = model_and_loss()
    backward(loss)
    theirs, loss = model_and_loss()
    loss.backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_backward_adds_to_the_gradients_there_are():
    model, loss = model_and_loss()
    backward(loss)
    once = [p.grad.clone() for p in model.parameters()]
    torch.manual_seed(0)
    nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    backward(model(torch.randn(4, 5)).pow(2).mean())
    for p, g in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)


def test_backward_runs_hooks_of_tensors():
    model, loss = model_and_loss()
    seen = []
    model[0].weight.register_hook(seen.append)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    backward(loss)
    assert len(seen) == 2


def test_backward_without_a_graph_is_the_usual_error():
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="scalar outputs"):
        backward(torch.ones(3, requires_grad=True) * 2)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
}


def train(make, step, zero_grad, scheduled=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    optimizer = make(model.parameters())
    fast = FastOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if scheduled else None
    for _ in range(5):
        model(torch.randn(4, 5)).pow(2).mean().backward()
        step(optimizer, fast)
        zero_grad(optimizer, fast)
        assert all(p.grad is None for p in model.parameters())
        if scheduler:
            scheduler.step()
    return [*model.parameters()], optimizer.state_dict()


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_gives_the_same_bits(name, scheduled, recwarn):
    fast, fast_state = train(OPTIMIZERS[name], lambda o, f: f.step(), lambda o, f: f.zero_grad(), scheduled)
    plain, plain_state = train(OPTIMIZERS[name], lambda o, f: o.step(), lambda o, f: o.zero_grad(), scheduled)
    assert all(torch.equal(a, b) for a, b in zip(fast, plain, strict=True))
    assert str(fast_state) == str(plain_state)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)], "the scheduler knows that step() was called"


def taken(optimizer, call="step"):
    """Return whether the public method is called."""
    calls = []
    fast = FastOptimizer(optimizer)
    original = getattr(type(optimizer), call)
    try:
        wrapper = lambda self, *args: (calls.append(1), original(self, *args))[1]  # noqa: E731
        wrapper.hooked = True  # torch's own mark, so that torch does not wrap it again
        setattr(type(optimizer), call, wrapper)
        getattr(fast, call)()
    finally:
        setattr(type(optimizer), call, original)
    return bool(calls)


def optimizer_with_gradients(cls=torch.optim.SGD):
    model, loss = model_and_loss()
    loss.backward()
    return cls(model.parameters(), lr=0.1)


def test_the_shortcut_is_used_for_a_plain_optimizer():
    assert not taken(optimizer_with_gradients())
    assert not taken(optimizer_with_gradients(), "zero_grad")


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_the_optimizer_are_called(hook):
    optimizer, seen = optimizer_with_gradients(), []
    fast = FastOptimizer(optimizer)
    getattr(optimizer, hook)(lambda *args: seen.append(1))
    fast.step()
    assert seen == [1]


def test_global_optimizer_hooks_are_called():
    optimizer, seen = optimizer_with_gradients(), []
    handle = register_optimizer_step_post_hook(lambda *args: seen.append(1))
    try:
        FastOptimizer(optimizer).step()
    finally:
        handle.remove()
    assert seen == [1]


def test_a_profiler_shows_the_step_by_its_name():
    optimizer = optimizer_with_gradients()
    fast = FastOptimizer(optimizer)
    with torch.profiler.profile() as profile:
        fast.step()
        fast.zero_grad()
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= names


def test_an_overridden_or_replaced_step_is_called():
    seen = []

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            seen.append("class")
            return super().step(closure)

        def zero_grad(self, set_to_none=True):
            seen.append("zero")
            super().zero_grad(set_to_none)

    fast = FastOptimizer(optimizer_with_gradients(Own))
    fast.step()
    fast.zero_grad()
    replaced = optimizer_with_gradients()
    fast = FastOptimizer(replaced)
    replaced.step = lambda: seen.append("instance")
    fast.step()
    assert seen == ["class", "zero", "instance"]


def test_gradients_are_enabled_again_after_a_step_that_fails():
    optimizer = optimizer_with_gradients()
    fast = FastOptimizer(optimizer)
    optimizer.param_groups[0]["lr"] = "wrong"
    with pytest.raises(TypeError):
        fast.step()
    assert torch.is_grad_enabled()


# ---------------------------------------------------------------------------- loaders


def loaders():
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    plain, arrays = TensorDataset(x, y), ArrayDataset(x, y)
    return {
        "plain": lambda: DataLoader(plain, batch_size=3),
        "shuffled": lambda: DataLoader(plain, batch_size=3, shuffle=True),
        "dropping": lambda: DataLoader(plain, batch_size=3, drop_last=True),
        "own generator": lambda: DataLoader(plain, 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
        "arrays": lambda: DataLoader(arrays, batch_size=4, collate_fn=arrays.collate_fn, shuffle=True),
        "own collate": lambda: DataLoader(plain, batch_size=2, collate_fn=len),
        "unbatched": lambda: DataLoader(plain, batch_size=None),
        "unbatched, shuffled": lambda: DataLoader(plain, batch_size=None, shuffle=True),
        "workers": lambda: DataLoader(plain, batch_size=5, num_workers=1),
    }


@pytest.mark.parametrize("name", loaders())
def test_batches_and_random_numbers_equal_the_loaders(name):
    def read(iterator_of):
        torch.manual_seed(0)
        batches = list(iterator_of(loaders()[name]()))
        return str(batches), torch.rand(1).item()

    assert read(iterate) == read(iter)


def test_a_subclass_of_the_loader_is_iterated_directly():
    class Own(DataLoader):
        def __iter__(self):
            return iter(["mine"])

    assert list(iterate(Own(range(3)))) == ["mine"]
    assert list(iterate([1, 2])) == [1, 2]
