"""SWA: the average, its learning rates, its batch norm statistics, and the final weights."""

import pytest
import torch
from fvcore.nn.precise_bn import update_bn_stats
from small_runs import config_trainer, kill_at, load
from torch.optim.swa_utils import SWALR

from hookline.config import ConfigError
from hookline.engine import DefaultTrainer, SimpleTrainer
from hookline.hooks import SWA, CallbackHook


@pytest.fixture
def make(tmp_path):
    def make(*overrides, folder="run", resume=False, swa=None):
        hooks = [] if swa is None else [{"NAME": "SWA", "ARGS": swa}]
        settings = [
            *("SOLVER.WARMUP_ITERS", 0, "SOLVER.STEPS", (10,), "SOLVER.GAMMA", 0.5),
            *("SOLVER.MAX_ITER", 30, "TEST.EVAL_PERIOD", "1ep", "HOOKS", hooks),
        ]
        return config_trainer(tmp_path / folder, *settings, *overrides, resume=resume)

    return make


SETTINGS = {"start": 0.5, "swa_lr": 0.02, "anneal": "1ep"}


def weights_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def noting(trainer):
    """The weights after each step, before evaluations and before the end."""
    notes = []
    note = CallbackHook(after_optimizer_step=lambda t: notes.append(weights_of(t.model)))
    trainer.register_hooks([note])
    return notes


def test_the_average_is_the_mean_of_the_snapshots(make, tmp_path):
    trainer = make(swa=SETTINGS)
    notes = noting(trainer)
    trainer.train()
    snapshots = [notes[i] for i in (19, 24, 29)]  # ends of epochs of 5 iterations, from iteration 15 on
    assert trainer.find_hook(SWA).updates == 3
    for name, parameter in trainer.model.named_parameters():
        mean = sum(snapshot[name] for snapshot in snapshots) / 3
        torch.testing.assert_close(parameter.detach(), mean)
        assert not torch.equal(parameter, notes[-1][name])
    checkpoint = load(tmp_path / "run")
    state = checkpoint["trainer"]["hooks"]["SWA"]
    for name, value in checkpoint["model"].items():
        assert torch.equal(value, trainer.model.state_dict()[name])
        assert torch.equal(value, state["averaged_model"][name])


def test_batch_norm_statistics_are_those_of_a_pass_over_the_data(make):
    trainer = make("MODEL.ARGS.dropout", 0.0, swa=SETTINGS)
    trainer.train()
    ours = weights_of(trainer.model)
    theirs = trainer.model
    loader = DefaultTrainer.build_train_loader(trainer.cfg)
    update_bn_stats(theirs, (x for x, _ in loader), 5)  # batches of an epoch
    assert any("running" in name for name in ours)
    for name, value in theirs.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(ours[name], value)


@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_learning_rates_are_those_of_torchs_swalr(make, strategy):
    rates = []
    trainer = make(swa={**SETTINGS, "anneal_strategy": strategy})
    trainer.register_hooks([CallbackHook(before_step=lambda t: rates.append(t.optimizer.param_groups[0]["lr"]))])
    trainer.train()
    assert rates[:10] == [0.1] * 10
    assert rates[10:15] == [0.05] * 5
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.05)
    swalr = SWALR(optimizer, swa_lr=0.02, anneal_epochs=5, anneal_strategy=strategy)
    expected = []
    for _ in range(15):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        swalr.step()
    assert rates[15:] == pytest.approx(expected)


def test_without_swa_lr_the_schedule_continues(make):
    rates = []
    trainer = make("SOLVER.STEPS", (10, 20), swa={"start": 0.5})
    trainer.register_hooks([CallbackHook(before_step=lambda t: rates.append(t.optimizer.param_groups[0]["lr"]))])
    trainer.train()
    assert rates == pytest.approx([0.1] * 10 + [0.05] * 10 + [0.025] * 10)


@pytest.mark.parametrize("evaluate", [True, False])
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_run(make, tmp_path, evaluate):
    swa = {**SETTINGS, "evaluate": evaluate}
    whole = make(folder="whole", swa=swa)
    expected = noting(whole)
    whole.train()
    kill_at(make(swa=swa), 18)
    kill_at(make(swa=swa, resume=True), 28)
    last = make(swa=swa, resume=True)
    notes = noting(last)
    last.train()
    whole, ours = load(tmp_path / "whole"), load(tmp_path / "run")
    for name, value in whole["model"].items():
        assert torch.equal(ours["model"][name], value), name
    for name, value in whole["trainer"]["hooks"]["SWA"]["averaged_model"].items():
        assert torch.equal(ours["trainer"]["hooks"]["SWA"]["averaged_model"][name], value), name
    assert all(map(torch.equal, notes[-1].values(), expected[-1].values()))  # the last weights before the average


def test_evaluating_the_average_does_not_affect_training(make):
    notes = []
    for swa in (None, {"start": 0.5}):
        trainer = make(folder=str(swa), swa=swa)
        notes.append(noting(trainer))
        trainer.train()
    for name, value in notes[0][-1].items():
        assert torch.equal(notes[1][-1][name], value), name


def test_a_run_that_ended_with_the_average_cannot_be_extended(make):
    make(swa=SETTINGS).train()
    make(swa=SETTINGS, resume=True)  # to evaluate it
    again = make("SOLVER.MAX_ITER", 40, swa=SETTINGS, resume=True)
    with pytest.raises(ConfigError, match="its model has the averaged weights"):
        again.train()


def test_the_last_evaluation_uses_the_final_weights(make):
    trainer = make(swa=SETTINGS)
    trainer.train()
    assert trainer.evaluate() == trainer._last_eval_results
    again = make(swa=SETTINGS, resume=True)
    assert again.evaluate() == trainer._last_eval_results


def test_final_last_keeps_the_last_weights(make, tmp_path):
    trainer = make(swa={**SETTINGS, "final": "last"})
    notes = noting(trainer)
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, notes[-1][name])
    state = load(tmp_path / "run")["trainer"]["hooks"]["SWA"]
    assert not torch.equal(state["averaged_model"]["classifier.bias"], notes[-1]["classifier.bias"])


def test_a_stopped_run_keeps_its_own_weights(make, tmp_path):
    trainer = make(swa=SETTINGS)
    notes = noting(trainer)
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.request_stop("now") if t.iter == 21 else None)])
    trainer.train()
    assert torch.equal(load(tmp_path / "run")["model"]["classifier.bias"], notes[-1]["classifier.bias"])


def test_batch_norms_without_data_are_an_error_before_training():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    trainer = SimpleTrainer(model, [1], torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks([SWA()])
    with pytest.raises(ConfigError, match="data_loader"):
        trainer.train(0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"anneal_strategy": "step"}, "anneal_strategy"),
        ({"final": "first"}, "final"),
        ({"bn_batches": 0}, "bn_batches"),
        ({"every": 0}, "every"),
        ({"start": "1h"}, "1h"),
    ],
)
def test_invalid_arguments_are_errors(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SWA(**arguments)


def test_a_wrong_number_of_learning_rates_is_an_error(make):
    with pytest.raises(ConfigError, match="swa_lr has 3 values"):
        make(swa={"swa_lr": [0.1, 0.2, 0.3]}).train()


def test_a_hook_that_moves_to_another_trainer_leaves_the_first_model_its_average(make):
    first, second = make(swa=SETTINGS), make(folder="second")
    first.train()
    before = weights_of(first.model)
    second.register_hooks(first.find_hooks(SWA))
    assert all(torch.equal(value, before[name]) for name, value in weights_of(first.model).items())
    assert second.find_hook(SWA).updates == 0
