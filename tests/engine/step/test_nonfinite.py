"""Losses and gradients that are NaN or infinite: the weights never see them, and nothing unchecked is saved."""

import math

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.step.cuda_graph import GraphedStep
from hookline.engine.step.finite import find_nonfinite, skip_on_device
from hookline.hooks import CallbackHook, ExceptionCheckpointer, PeriodicCheckpointer

from .test_cuda_graph import Calls

GOOD, BAD_GRADIENT, BAD_LOSS = 1.0, 3e38, math.nan


class Net(nn.Module):
    """Its gradient is the sum of a batch's four rows, infinite for ``BAD_GRADIENT``; its loss is 3."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, batch):
        terms = [((weight - weight.detach()) * batch).sum() for weight in (self.a, self.b)]
        return {"loss": terms[0] + terms[1] + 3.0}


class Late(SimpleTrainer):
    """Takes its steps as on a GPU: they do not wait for the check."""

    def _device_type(self):
        return "cuda"


def data(*values):
    return [torch.full((4, 3), value) for value in values]


def sgd(parameters, **kwargs):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **kwargs)


def make(way, batches, **kwargs):
    net = Net()
    cls, optimizer = SimpleTrainer, sgd(net.parameters(), fused=way in ("late", "captured", "late and captured"))
    if way == "accumulated":
        kwargs["accumulation_steps"] = 2
    elif way == "two optimizers":
        optimizer = [sgd([net.a]), sgd([net.b])]
    elif way == "clipped":
        kwargs["clip_gradients"] = lambda parameters: nn.utils.clip_grad_value_(parameters, 10.0)
    elif way == "compiled":
        kwargs["compile_step"] = {"backend": "eager"}
    elif way.startswith("late"):
        cls = Late
    trainer = cls(net, batches, optimizer, **kwargs)
    if "captured" in way:
        trainer._whole_step = GraphedStep(Calls())
        trainer._whole_step._graphs.device_type = trainer._device_type()
    return trainer


WAYS = ("plain", "accumulated", "two optimizers", "clipped", "compiled", "captured", "late", "late and captured")
# Captured steps begin after three ordinary ones.
VALUES = [GOOD, GOOD, GOOD, GOOD, BAD_GRADIENT, GOOD]


def weights(trainer):
    return [parameter.tolist() for parameter in trainer.model.parameters()]


def after_good_steps(way, count):
    trainer = make(way, data(*[GOOD] * count))
    trainer.train(0, count)
    return weights(trainer)


@pytest.mark.parametrize("way", WAYS)
def test_an_infinite_gradient_of_a_finite_loss_is_an_error_and_does_not_reach_the_weights(way):
    trainer = make(way, data(*VALUES))
    with pytest.raises(FloatingPointError, match=r"gradient.* is NaN or infinite at iteration 4"):
        trainer.train(0, 6)
    done = 5 if way.startswith("late") else 4  # late: another step ran before the flags were read
    assert weights(trainer) == after_good_steps(way, done)


@pytest.mark.parametrize("way", WAYS)
def test_an_infinite_gradient_of_a_finite_loss_is_skipped_and_counted(way):
    trainer = make(way, data(*VALUES), nonfinite="skip")
    result = trainer.train(0, 6)
    assert result.reason == "completed"
    assert trainer.storage.history("nonfinite_steps").values() == [(1, 4)]
    assert weights(trainer) == after_good_steps(way, 5)


@pytest.mark.parametrize("way", WAYS)
def test_an_infinite_gradient_of_a_finite_loss_stops_training(way):
    trainer = make(way, data(*VALUES), nonfinite="stop")
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.request_write())])
    result = trainer.train(0, 6)
    assert "is NaN or infinite at iteration 4" in result.reason
    assert result.iteration == 5
    assert weights(trainer) == after_good_steps(way, 4)


def test_the_error_names_the_parameter_whose_gradient_it_is():
    class OnlyB(Net):
        def forward(self, batch):
            return {"loss": ((self.b - self.b.detach()) * batch).sum() + self.a.sum()}

    net = OnlyB()
    with pytest.raises(FloatingPointError, match=r"the gradient of b is NaN .* with losses \{'loss': 3.0\}"):
        SimpleTrainer(net, data(BAD_GRADIENT), sgd(net.parameters())).train(0, 1)


@pytest.mark.parametrize("way", ["plain", "late"])
def test_losses_are_checked_in_steps_that_put_no_metrics(way):
    class Beside(Net):
        def forward(self, batch):
            return {"loss": super().forward(torch.ones(4, 3))["loss"], "beside": batch.sum()}

    trainer = make(way, data(GOOD, BAD_LOSS, GOOD), gather_metric_period=100)
    trainer.model = Beside()
    trainer.optimizer = sgd(trainer.model.parameters(), fused=True)
    with pytest.raises(FloatingPointError, match="is NaN or infinite at iteration 1"):
        trainer.train(0, 3)


@pytest.mark.parametrize("kind", ["sparse", "complex", "double and half"])
def test_gradients_of_all_types_are_checked(kind):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, 3, sparse=kind == "sparse")
            dtype = {"complex": torch.complex64, "double and half": torch.float64}.get(kind)
            self.weight = nn.Parameter(torch.ones(3, dtype=dtype))
            self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, batch):
            x = self.table(torch.tensor([0]))
            return {"loss": ((x - x.detach()) * batch).sum() + self.weight.abs().sum() + self.low.sum()}

    net = Other()
    trainer = SimpleTrainer(net, data(GOOD, BAD_GRADIENT), torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(FloatingPointError, match=r"the gradient of table\.weight is NaN or infinite at iteration 1"):
        trainer.train(0, 2)


@pytest.mark.parametrize("late", [False, True])
def test_the_check_does_not_change_gradients(late):
    gradient = torch.tensor([1e-45, -0.0, 1.1, 3e38])
    before = gradient.clone()
    assert find_nonfinite([gradient], torch.zeros(())).item() == 0
    assert torch.equal(gradient.view(torch.int32), before.view(torch.int32))


class Normed(Net):
    """Has batch norm's statistics, which a forward pass changes before the step is checked."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, batch):
        loss = super().forward(batch)["loss"]
        return {"loss": loss + 0.0 * self.norm(batch).sum()}


@pytest.mark.parametrize("value", [BAD_GRADIENT, BAD_LOSS])
@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_does_not_change_the_statistics_of_batch_norm(way, value, monkeypatch):
    monkeypatch.setitem(globals(), "Net", Normed)
    found = []
    for values in ([GOOD, GOOD, GOOD, GOOD, value, GOOD], [GOOD] * 5):
        trainer = make(way, data(*values), nonfinite="skip")
        trainer.train(0, len(values))
        found.append(trainer.model.state_dict())
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------- saving


def saved(folder):
    """The weights of each checkpoint of a folder, by name."""
    return {
        path.stem: [value for weight in torch.load(path)["model"].values() for value in weight.tolist()]
        for path in sorted(folder.glob("*.pth"))
    }


def train_and_save(folder, trainer, steps=6, hooks=()):
    checkpointer = Checkpointer(trainer.model, str(folder), trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, period=1), *hooks])
    if trainer._whole_step is None:
        trainer.register_hooks([ExceptionCheckpointer(checkpointer)])
    return trainer.train(0, steps)


@pytest.mark.parametrize("fused", [True, False])
def test_nothing_is_saved_before_late_flags_are_read(tmp_path, fused):
    net = Net()
    trainer = Late(net, data(*VALUES), sgd(net.parameters(), fused=fused), gather_metric_period=100)
    with pytest.raises(FloatingPointError, match="iteration 4"):
        train_and_save(tmp_path, trainer)
    assert list(saved(tmp_path)) == [f"model_{iteration:07d}" for iteration in range(4)]
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000003.pth"


@pytest.mark.parametrize("value", [BAD_GRADIENT, BAD_LOSS])
@pytest.mark.parametrize("policy", ["skip", "stop"])
@pytest.mark.parametrize("way", WAYS)
def test_all_checkpoints_of_a_run_that_skips_or_stops_are_finite(tmp_path, way, policy, value):
    trainer = make(way, data(GOOD, GOOD, GOOD, GOOD, value, GOOD), nonfinite=policy, gather_metric_period=3)
    train_and_save(tmp_path, trainer)
    files = saved(tmp_path)
    assert "model_final" in files
    assert all(math.isfinite(weight) for weights in files.values() for weight in weights)


@pytest.mark.parametrize("way", ["plain", "late"])
def test_weights_that_an_update_made_infinite_are_not_saved(tmp_path, way):
    trainer = make(way, data(GOOD, GOOD, GOOD), nonfinite="skip")

    def too_much(t):
        t.optimizer.param_groups[0]["lr"] = 1e38 if t.iter == 1 else 0.01

    with pytest.raises(FloatingPointError, match=r"a and 1 others is NaN or infinite after iteration 1: .* nor saved"):
        train_and_save(tmp_path, trainer, hooks=[CallbackHook(before_step=too_much)])
    assert list(saved(tmp_path)) == ["model_0000000"]


def test_another_failure_saves_no_unchecked_weights(tmp_path):
    net = Net()
    trainer = Late(net, data(GOOD, BAD_GRADIENT, GOOD), sgd(net.parameters()))

    def fail(t):
        if t.iter == 2:
            raise KeyError("something else")

    checkpointer = Checkpointer(net, str(tmp_path), trainer=trainer)
    trainer.register_hooks([ExceptionCheckpointer(checkpointer), CallbackHook(after_step=fail)])
    with pytest.raises(KeyError, match="something else"):
        trainer.train(0, 3)
    assert saved(tmp_path) == {}


def test_a_save_without_a_request_is_checked(tmp_path):
    net = Net()
    trainer = Late(net, data(GOOD, BAD_GRADIENT, GOOD), sgd(net.parameters()))
    checkpointer = Checkpointer(net, str(tmp_path), trainer=trainer)
    trainer.register_hooks([CallbackHook(after_step=lambda t: checkpointer.save(f"mine_{t.iter}"))])
    with pytest.raises(FloatingPointError, match="iteration 1"):
        trainer.train(0, 3)
    assert list(saved(tmp_path)) == ["mine_0"]


# ---------------------------------------------------------------------------- many in a row


@pytest.mark.parametrize("way", ["plain", "compiled", "late"])
def test_many_steps_in_a_row_without_an_update_are_an_error(way):
    trainer = make(
        way, data(GOOD, BAD_GRADIENT, BAD_LOSS, GOOD, *[BAD_GRADIENT] * 3), nonfinite="skip", nonfinite_limit=3
    )
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.request_write())])
    with pytest.raises(FloatingPointError, match=r"iteration 6.* 3 iterations in a row .* SOLVER\.NONFINITE_LIMIT"):
        trainer.train(0, 7)
    assert trainer.nonfinite.steps == 5


@pytest.mark.parametrize("cls", [SimpleTrainer, Late])
def test_a_scaler_may_lower_its_scale_but_not_forever(cls):
    def train(value, limit):
        net = Net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
        trainer = cls(
            net, data(value), sgd(net.parameters()), grad_scaler=scaler, nonfinite_limit=limit, nonfinite="raise"
        )
        trainer.train(0, 60)
        return trainer

    trainer = train(2.0**10, 50)
    assert trainer.grad_scaler.get_scale() == 2.0**115
    assert trainer.nonfinite.in_a_row == trainer.nonfinite.steps == 0
    with pytest.raises(FloatingPointError, match=r"50 iterations in a row .* SOLVER\.NONFINITE_LIMIT"):
        train(BAD_GRADIENT, 50)


def test_a_resumed_run_continues_the_count():
    first = make("plain", data(BAD_LOSS, BAD_LOSS, GOOD), nonfinite="skip", nonfinite_limit=3)
    first.train(0, 2)
    again = make("plain", data(BAD_LOSS, BAD_LOSS, BAD_LOSS), nonfinite="skip", nonfinite_limit=3)
    again.load_state_dict(first.state_dict())
    with pytest.raises(FloatingPointError, match="3 iterations in a row"):
        again.train(2, 3)
    assert again.nonfinite.steps == 3


# ---------------------------------------------------------------------------- optimizers that look themselves


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_optimizer_skips_its_update_by_itself(cls):
    weight = nn.Parameter(torch.ones(3))
    optimizer = cls([weight], lr=0.1, fused=True)
    for found in (1.0, 0.0):
        weight.sum().backward()
        skip_on_device([optimizer], torch.tensor(found))
        optimizer.step()
        assert torch.equal(weight, torch.ones(3)) == bool(found)


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_an_optimizer_that_is_not_fused_is_refused(policy):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ConfigError, match=rf"SOLVER\.NONFINITE_LOSS: {policy} needs a fused optimizer.*SGD"):
        skip_on_device([optimizer], torch.zeros(()), policy)
    skip_on_device([optimizer], torch.zeros(()), "raise")
