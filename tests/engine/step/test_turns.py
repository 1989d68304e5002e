import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer
from hookline.engine.solver import OptimizerList
from hookline.hooks import HookBase


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(2, 3), nn.Linear(3, 1)
        self.calls = []

    def forward(self, real, optimizer=None):
        self.calls.append(optimizer)
        fake = self.generator(torch.ones(len(real), 2))
        if optimizer == "generator":
            return {"loss": softplus(-self.critic(fake)).mean()}
        return {"fake": softplus(self.critic(fake.detach())).mean(), "real": softplus(-self.critic(real)).mean()}


def optimizers(model, every=None):
    named = {"critic": torch.optim.Adam(model.critic.parameters(), 0.1)}
    named["generator"] = torch.optim.SGD(model.generator.parameters(), 0.1)
    return OptimizerList(named, every)


DATA = list(torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(1)))


def by_hand(steps, every=1):
    """The loop that people write."""
    model = Gan()
    critic, generator = optimizers(model)
    for i in range(steps):
        losses = model(DATA[i % 6])
        critic.zero_grad()
        sum(losses.values()).backward()
        critic.step()
        if (i + 1) % every == 0:
            generator.zero_grad()
            model(DATA[i % 6], "generator")["loss"].backward()
            generator.step()
    return model.state_dict()


def train(steps, hooks=(), every=None, model=None, **args):
    model = model or Gan()
    trainer = SimpleTrainer(model, DATA, optimizers(model, every), **args)
    trainer.register_hooks(hooks)
    trainer.train(0, steps)
    return trainer


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_optimizers_take_turns_as_in_a_loop_written_by_hand():
    trainer = train(9)
    assert equal(trainer.model.state_dict(), by_hand(9))
    assert trainer.model.calls == ["critic", "generator"] * 9
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("before", [True, False])
def test_an_optimizer_may_have_a_turn_every_few_iterations(before):
    trainer = train(9, every={"generator": 3}, zero_grad_before_forward=before)
    assert equal(trainer.model.state_dict(), by_hand(9, every=3))
    assert trainer.model.calls.count("generator") == 3


def test_losses_are_logged_with_the_name_of_the_optimizer():
    storage = train(3, clip_gradients=lambda parameters: torch.tensor(float(len(parameters)))).storage
    latest = {name: value for name, (value, _) in storage.latest().items()}
    parts = [latest[name] for name in ("critic/fake", "critic/real", "generator/loss")]
    assert latest["total_loss"] == pytest.approx(sum(parts))
    assert (latest["critic/grad_norm"], latest["generator/grad_norm"]) == (2.0, 2.0)
    assert [it for _, it in storage.history("generator/loss").values()] == [0, 1, 2]


class Turn(HookBase):
    def __init__(self):
        self.seen = []

    def before_forward(self, batch):
        self.seen.append(type(self.trainer.optimizer).__name__)

    def after_optimizer_step(self):
        self.seen.append("step")

    def after_step(self):
        self.seen.append(type(self.trainer.optimizer).__name__)


def test_each_turn_has_the_events_of_a_step():
    turn = Turn()
    train(1, [turn])
    assert turn.seen == ["Adam", "step", "SGD", "step", "OptimizerList"]


def test_batches_are_cut_into_micro_batches_in_each_turn():
    whole, cut = train(6).model.state_dict(), train(6, accumulation_steps=2).model.state_dict()
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name])


class Bad(Gan):
    """The critic's loss is NaN in iteration 1."""

    def forward(self, real, optimizer=None):
        losses = super().forward(real, optimizer)
        if optimizer == "critic" and self.calls.count("critic") == 2:
            return {name: loss * float("nan") for name, loss in losses.items()}
        return losses


def test_a_loss_that_is_not_finite_skips_its_own_turn_only():
    trainer = train(2, model=Bad(), nonfinite="skip")
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert trainer.optimizer["critic"].state_dict()["state"][0]["step"] == 1
    assert trainer.model.calls == ["critic", "generator"] * 2
    with pytest.raises(FloatingPointError, match="the loss of critic is NaN or infinite at iteration 1"):
        train(2, model=Bad())


def test_a_model_without_the_parameter_steps_all_optimizers_together():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    both = {"a": torch.optim.SGD(model[0].parameters(), 0.1), "b": torch.optim.SGD(model[1].parameters(), 0.1)}
    trainer = SimpleTrainer(Loss(model), [torch.ones(1, 2)], both)
    before = [parameter.clone() for parameter in model.parameters()]
    trainer.train(0, 1)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    with pytest.raises(ConfigError, match=r"EVERY needs a model that takes turns, but Loss\.forward has no"):
        SimpleTrainer(Loss(model), [torch.ones(1, 2)], OptimizerList(both, {"a": 2}))


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().sum()
