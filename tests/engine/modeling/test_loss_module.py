"""Losses with parameters and buffers."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hookline import Trainer
from hookline.config import ConfigError
from hookline.engine import DefaultTrainer
from hookline.hooks import CallbackHook

DATA = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
X, Y = DATA


class Learned(nn.Module):
    """Has a learned temperature and a running mean, which it updates in eval mode too."""

    def __init__(self):
        super().__init__()
        self.t = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, out, y):
        loss = cross_entropy(out, y)
        self.mean = self.mean.lerp(loss.detach(), 0.1)
        return loss * (-self.t).exp() + self.t


def make(folder, loss, *hooks, model=lambda: nn.Linear(4, 3), config=None, **options):
    options = {"lr": 0.1, "length": "5ep", "batch_size": 10, "seed": 1, **options}
    config = {"SOLVER.MOMENTUM": 0.0, "SOLVER.WEIGHT_DECAY": 0.0, **(config or {})}
    return Trainer(model, DATA, loss=loss, output_dir=folder, hooks=hooks, config=config, **options)


@pytest.mark.parametrize(
    "form", [lambda: Learned, Learned, lambda: Learned().forward], ids=["class", "object", "method"]
)
def test_parameters_and_buffers_of_a_loss_are_trained_cleared_saved_and_resumed(form, tmp_path):
    model, loss = nn.Linear(4, 3), Learned()
    whole = make(tmp_path / "whole", form())
    model.load_state_dict(whole.model.state_dict())
    sgd, order = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1), []
    whole.register_hooks([CallbackHook(after_fetch=lambda trainer, batch: order.append(batch))])
    whole.train()
    for x, y in order:  # by hand
        sgd.zero_grad()
        loss(model(x), y).backward()
        sgd.step()
    trained = whole.loss_module.module
    assert trained.t.item() == pytest.approx(loss.t.item(), rel=1e-4) != 0
    assert trained.mean.item() == pytest.approx(loss.mean.item(), rel=1e-4)
    assert trained.t.grad is None
    stop = CallbackHook(after_step=lambda t: t.iter == 12 and t.request_stop("", exit_code=75))
    make(tmp_path / "parts", form(), stop).train()
    resumed = make(tmp_path / "parts", form())
    resumed.train(resume=True)
    assert resumed.iter == 20
    assert resumed.loss_module.module.state_dict() == trained.state_dict()
    assert torch.equal(resumed.model.weight, whole.model.weight)


def test_evaluations_use_the_loss_of_the_trainer_in_eval_mode_and_restore_it(tmp_path):
    trainer = make(tmp_path, Learned, test_data=DATA, metrics=["Loss"])
    trainer.train()
    loss, mean = trainer.loss_module.module, trainer.loss_module.module.mean
    expected = pytest.approx((cross_entropy(trainer.model(X), Y) * (-loss.t).exp() + loss.t).item())
    assert trainer.evaluate() == {"test": {"loss": expected}} == {"test": trainer.predict(metrics=True).metrics}
    assert loss.mean is mean
    assert loss.training
    weights = {"MODEL.WEIGHTS": str(tmp_path / "model_final.pth")}
    again = make(tmp_path / "again", Learned, test_data=DATA, metrics=["Loss"], config=weights)
    assert again.evaluate() == {"test": {"loss": expected}}


def test_the_best_weights_are_loaded_with_the_loss_they_were_trained_with(tmp_path):
    options = {"test_data": DATA, "monitor": "test/loss", "eval_period": "1ep"}
    trainer = make(tmp_path, Learned, **options, monitor_mode="max", config={"CHECKPOINT.LOAD_BEST_AT_END": True})
    trainer.train()
    saved = torch.load(tmp_path / "model_best.pth")
    assert saved["trainer"]["iteration"] < 19
    assert trainer.loss_module.module.t == saved["trainer"]["loss"]["t"]


def test_rules_name_the_parameters_of_a_loss_and_a_missing_one_is_an_error(tmp_path):
    rules = {"SOLVER.PARAM_GROUPS": [{"PARAMS": "loss.t", "LR_FACTOR": 0.1}]}
    trainer = make(tmp_path, Learned, config=rules)
    loss = trainer.loss_module.module
    rates = {parameter: group["lr"] for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert (rates[loss.t], rates[trainer.model.weight]) == pytest.approx((0.01, 0.1))
    model = nn.Linear(4, 3)
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "lr": None}
    with pytest.raises(ConfigError, match="does not update the loss's parameter t"):
        make(tmp_path, Learned(), model=model, **given).train()


class Plain:
    def __init__(self):
        self.part = Learned()

    def __call__(self, out, y):
        return self.part(out, y)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=torch.ones(3)), cross_entropy, Plain()])
def test_a_loss_without_state_leaves_the_checkpoint_as_it_is(loss, tmp_path, log):
    make(tmp_path, loss, length=2).train()
    assert "loss" not in torch.load(tmp_path / "model_final.pth")["trainer"]
    assert ("parameters of Plain.part are neither trained nor saved" in log.text) == isinstance(loss, Plain)


def test_an_evaluation_without_the_trainer_says_that_its_loss_is_new(tmp_path, log):
    trainer = make(tmp_path, Learned, test_data=DATA, metrics=["Loss"])
    DefaultTrainer.test(trainer.cfg, trainer.model)
    assert "those of this evaluation are new" in log.text


class WithLoss(nn.Linear):
    """A model with a submodule ``loss`` of its own."""

    def __init__(self, loss):
        super().__init__(4, 3)
        self.loss, self.last = loss, nn.Identity()


@pytest.mark.parametrize(("own", "name"), [(nn.CrossEntropyLoss(), "loss.t"), (Learned(), "loss_.t")])
def test_a_model_may_have_a_submodule_loss_of_its_own(own, name, tmp_path):
    rules = {"SOLVER.PARAM_GROUPS": [{"PARAMS": name, "LR_FACTOR": 0.1}]}
    trainer = make(tmp_path, Learned, model=lambda: WithLoss(own), config=rules, length=2)
    trainer.train()
    assert trainer.loss_module.module.t != 0
    assert list(trainer.model._modules.items()) == [("loss", own), ("last", trainer.model.last)]


def test_a_resume_says_which_buffers_of_a_loss_are_not_the_scripts(tmp_path, log):
    def weighted(value):
        loss = Learned()
        loss.register_buffer("weights", torch.full((3,), value))
        return loss

    make(tmp_path, weighted(1.0), length=2).train()
    make(tmp_path, weighted(2.0), length=4).train(resume=True)
    assert "The loss's buffers get the checkpoint's values: mean, weights" in log.text
