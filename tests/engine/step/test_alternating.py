import pytest
import torch
from small_runs import Gan, same

from hookline.engine import SimpleTrainer
from hookline.engine.modeling import ModelAdapter
from hookline.engine.solver.multi_optimizer import OptimizerList
from hookline.hooks import CallbackHook


def optimizers(model):
    named = {"critic": torch.optim.Adam(model.critic.parameters(), 0.1)}
    named["generator"] = torch.optim.SGD(model.generator.parameters(), 0.1)
    return OptimizerList(named)


DATA = [(real,) for real in torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(1))]


def gan(cls=Gan):
    torch.manual_seed(0)
    return cls()


def by_hand(steps):
    """The loop that people write."""
    model = gan()
    critic, generator = optimizers(model)
    for i in range(steps):
        losses = model(DATA[i % 6])
        critic.zero_grad()
        sum(losses.values()).backward()
        critic.step()
        generator.zero_grad()
        model(DATA[i % 6], "generator")["loss"].backward()
        generator.step()
    return model.state_dict()


def train(steps, hooks=(), model=None, **args):
    model = model or gan()
    trainer = SimpleTrainer(model, DATA, optimizers(model), **args)
    trainer.register_hooks(hooks)
    trainer.train(0, steps)
    return trainer


class Calling(ModelAdapter):
    """Calls the model by itself."""

    def losses(self, model, batch):
        return model(batch)


@pytest.mark.parametrize("clear_first", [False, True])
def test_optimizers_take_turns_as_in_a_loop_written_by_hand(clear_first):
    seen = []
    turn = CallbackHook(
        before_forward=lambda t, batch: seen.append(type(t.optimizer).__name__),
        after_optimizer_step=lambda t: seen.append("step"),
        after_step=lambda t: seen.append(type(t.optimizer).__name__),
    )
    trainer = train(9, [turn], zero_grad_before_forward=clear_first)
    assert same(trainer.model, by_hand(9))
    assert seen == ["Adam", "step", "SGD", "step", "OptimizerList"] * 9


def test_an_adapter_that_calls_the_model_by_itself_gives_it_the_turn():
    assert set(train(2, adapter=Calling()).storage.latest()) == set(train(2).storage.latest())


def test_losses_are_logged_with_the_name_of_the_optimizer():
    storage = train(3, clip_gradients=lambda parameters: torch.tensor(float(len(parameters)))).storage
    latest = {name: value for name, (value, _) in storage.latest().items()}
    parts = [latest[name] for name in ("critic/fake", "critic/real", "generator/loss")]
    assert latest["total_loss"] == pytest.approx(sum(parts))
    assert (latest["critic/grad_norm"], latest["generator/grad_norm"]) == (2.0, 2.0)
    assert [it for _, it in storage.history("generator/loss").values()] == [0, 1, 2]


def test_batches_are_cut_into_micro_batches_in_each_turn():
    whole, cut = train(6).model.state_dict(), train(6, accumulation_steps=2).model.state_dict()
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name])


class Bad(Gan):
    """The critic's loss is NaN in iteration 1."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, batch, optimizer=None):
        self.calls.append(optimizer)
        bad = self.calls == ["critic", "generator", "critic"]
        return {name: loss * float("nan" if bad else 1) for name, loss in super().forward(batch, optimizer).items()}


def test_a_loss_that_is_not_finite_skips_its_own_turn_only():
    trainer = train(2, model=gan(Bad), nonfinite="skip")
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert trainer.optimizer["critic"].state_dict()["state"][0]["step"] == 1
    assert trainer.model.calls == ["critic", "generator"] * 2
    with pytest.raises(FloatingPointError, match=r"iteration 1: .*critic/fake"):
        train(2, model=gan(Bad))
