"""Losses and gradients that are NaN or infinite: the weights never see them, and nothing unchecked is saved."""

import math

import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.engine.checkpoint import Checkpointer
from hookline.hooks import CallbackHook, ExceptionCheckpointer, PeriodicCheckpointer

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

    device_type = "cuda"


def data(*values):
    return [torch.full((4, 3), value) for value in values]


def sgd(parameters, **kwargs):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **kwargs)


def make(way, batches, model=Net, **kwargs):
    net = model()
    cls, optimizer = SimpleTrainer, sgd(net.parameters(), fused=way == "late")
    if way == "accumulated":
        kwargs["accumulation_steps"] = 2
    elif way == "two optimizers":
        optimizer = [sgd([net.a]), sgd([net.b])]
    elif way == "clipped":
        kwargs["clip_gradients"] = lambda parameters: nn.utils.clip_grad_value_(parameters, 10.0)
    elif way == "late":
        cls = Late
    return cls(net, batches, optimizer, **kwargs)


WAYS = ("plain", "accumulated", "two optimizers", "clipped", "late")
VALUES = [GOOD, GOOD, GOOD, GOOD, BAD_GRADIENT, GOOD]


def saved(folder):
    """The weights of each checkpoint of a folder, by name."""
    return {
        path.stem: [value for weight in torch.load(path)["model"].values() for value in weight.tolist()]
        for path in sorted(folder.glob("*.pth"))
    }


def train_and_save(folder, trainer, steps=6, hooks=()):
    checkpointer = Checkpointer(trainer.model, str(folder), trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, period=1), *hooks])
    trainer.register_hooks([ExceptionCheckpointer(checkpointer)])
    return trainer.train(0, steps)


def weights(trainer):
    return [value for parameter in trainer.model.parameters() for value in parameter.tolist()]


@pytest.mark.parametrize("way", WAYS)
def test_an_infinite_gradient_of_a_finite_loss_does_not_reach_the_weights(way, tmp_path):
    """With each policy. What is saved meanwhile is finite."""
    good, after = make(way, data(*[GOOD] * 5)), {0: [1.0] * 6}
    good.register_hooks([CallbackHook(after_step=lambda t: after.update({t.iter + 1: weights(t)}))])
    good.train(0, 5)

    failed = make(way, data(*VALUES))
    with pytest.raises(FloatingPointError, match=r"gradient.* at iteration 4"):
        failed.train(0, 6)
    assert weights(failed) == after[5 if way == "late" else 4]  # another step ran before the flags were read

    skipped = make(way, data(*VALUES), nonfinite="skip", gather_metric_period=3)
    result = train_and_save(tmp_path / "skip", skipped)
    assert (result.reason, result.metrics["nonfinite_steps"], skipped.nonfinite.steps) == ("completed", 1, 1)
    assert weights(skipped) == after[5]

    stopped = make(way, data(*VALUES[:4], BAD_LOSS, GOOD), nonfinite="stop")
    result = train_and_save(tmp_path / "stop", stopped)
    assert "at iteration 4" in result.reason
    assert result.iteration == 5
    assert weights(stopped) == after[4]
    for policy in ("skip", "stop"):
        files = saved(tmp_path / policy)
        assert "model_final" in files
        assert all(math.isfinite(weight) for values in files.values() for weight in values)


class Beside(Net):
    def forward(self, batch):
        return {"loss": super().forward(torch.ones(4, 3))["loss"], "beside": batch.sum()}


@pytest.mark.parametrize("way", ["plain", "late"])
def test_losses_are_checked_in_steps_that_put_no_metrics(way):
    trainer = make(way, data(GOOD, BAD_LOSS, GOOD), Beside, gather_metric_period=100)
    with pytest.raises(FloatingPointError, match="is NaN or infinite at iteration 1"):
        trainer.train(0, 3)


def test_sparse_and_low_precision_gradients_are_checked_by_parameter():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, 3, sparse=True)
            self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, batch):
            x = self.table(torch.tensor([0]))
            return {"loss": ((x - x.detach()) * batch).sum() + self.low.sum()}

    net = Other()
    trainer = SimpleTrainer(net, data(GOOD, BAD_GRADIENT), torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(FloatingPointError, match=r"table\.weight is NaN or infinite at iteration 1"):
        trainer.train(0, 2)


class Normed(Net):
    """Has batch norm's statistics, which a forward pass changes before the step is checked."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, batch):
        loss = super().forward(batch)["loss"]
        return {"loss": loss + 0.0 * self.norm(batch).sum()}


@pytest.mark.parametrize("way", ["plain", "late"])
def test_a_buffer_that_a_skipped_step_made_nan_is_neither_saved_nor_evaluated(tmp_path, way):
    trainer = make(way, data(GOOD, BAD_LOSS, GOOD), Normed, nonfinite="skip")
    trainer.model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))  # a buffer may be infinite
    with pytest.raises(FloatingPointError, match=r"norm\.running_mean"):
        train_and_save(tmp_path, trainer, steps=3)
    assert [path.name for path in tmp_path.glob("*.pth")] == ["model_0000000.pth"]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("announced", [True, False])
def test_nothing_is_saved_before_late_flags_are_read(tmp_path, fused, announced):
    net = Net()
    trainer = Late(net, data(*VALUES), sgd(net.parameters(), fused=fused), gather_metric_period=100)
    checkpointer = Checkpointer(net, str(tmp_path), trainer=trainer)
    mine = CallbackHook(after_step=lambda t: checkpointer.save(f"model_{t.iter:07d}"))  # the trainer is not told
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, period=1) if announced else mine])
    with pytest.raises(FloatingPointError, match="iteration 4"):
        trainer.train(0, 6)
    assert list(saved(tmp_path)) == [f"model_{iteration:07d}" for iteration in range(4)]
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000003.pth"


@pytest.mark.parametrize("way", ["plain", "late"])
def test_weights_that_an_update_made_infinite_are_not_saved(tmp_path, way):
    trainer = make(way, data(GOOD, GOOD, GOOD), nonfinite="skip")

    def too_much(t):
        t.optimizer.param_groups[0]["lr"] = 1e38 if t.iter == 1 else 0.01

    with pytest.raises(FloatingPointError, match="after iteration 1"):
        train_and_save(tmp_path, trainer, hooks=[CallbackHook(before_step=too_much)])
    assert list(saved(tmp_path)) == ["model_0000000"]


@pytest.mark.parametrize("way", ["plain", "late"])
def test_many_steps_in_a_row_without_an_update_are_an_error(way):
    values = [GOOD, BAD_GRADIENT, BAD_LOSS, GOOD, BAD_GRADIENT, BAD_GRADIENT, BAD_GRADIENT]
    trainer = make(way, data(*values), nonfinite="skip", nonfinite_limit=3)
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.request_write())])
    with pytest.raises(FloatingPointError, match=r"iteration 6.*SOLVER\.NONFINITE_LIMIT"):
        trainer.train(0, 7)
    assert trainer.nonfinite.steps == 5


@pytest.mark.parametrize("cls", [SimpleTrainer, Late])
def test_a_scaler_may_lower_its_scale_but_not_forever(cls):
    def trainer(value):
        net, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0**120)
        return cls(net, data(value), sgd(net.parameters()), grad_scaler=scaler, nonfinite_limit=50, nonfinite="raise")

    lowered = trainer(2.0**10)
    lowered.train(0, 60)
    assert lowered.grad_scaler.get_scale() == 2.0**115
    assert lowered.nonfinite.in_a_row == lowered.nonfinite.steps == 0
    with pytest.raises(FloatingPointError, match=r"SOLVER\.NONFINITE_LIMIT"):
        trainer(BAD_GRADIENT).train(0, 60)


def test_a_scaler_that_is_disabled_does_nothing():
    net, scaler = Net(), torch.amp.GradScaler("cpu", enabled=False)
    SimpleTrainer(net, data(GOOD), sgd(net.parameters()), grad_scaler=scaler).train(0, 1)
    assert net.a[0].item() == pytest.approx(1.0 - 0.01 * 4 * GOOD)


def test_a_resumed_run_continues_the_count():
    first = make("plain", data(BAD_LOSS, BAD_LOSS, GOOD), nonfinite="skip", nonfinite_limit=3)
    first.train(0, 2)
    again = make("plain", data(BAD_LOSS, BAD_LOSS, BAD_LOSS), nonfinite="skip", nonfinite_limit=3)
    again.load_state_dict(first.state_dict())
    with pytest.raises(FloatingPointError, match="NONFINITE_LIMIT"):
        again.train(2, 3)
    assert again.nonfinite.steps == 3


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_without_a_fused_optimizer_only_an_error_is_possible_on_a_gpu(policy):
    net = Net()
    with pytest.raises(ConfigError, match=rf"SOLVER\.NONFINITE_LOSS: {policy}.*SGD"):
        Late(net, data(GOOD), sgd(net.parameters()), nonfinite=policy).train(0, 1)


@pytest.mark.parametrize("way", ["plain", "late", "accumulated"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_steps_are_checked_with_another_default_dtype(dtype, way):
    try:
        torch.set_default_dtype(dtype)
        trainer = make(way, data(GOOD, BAD_GRADIENT * (1e300 if dtype is torch.float64 else 1), GOOD), nonfinite="skip")
        trainer.train(0, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (trainer.nonfinite.steps, trainer.model.a.dtype) == (1, dtype)
    assert trainer.model.a.isfinite().all()
