"""SWA: the average, its batch norm statistics, and the final weights."""

import pytest
import torch
from fvcore.nn.precise_bn import update_bn_stats
from metric_runs import at
from small_runs import Net, Weights, assert_same, config_trainer, load, make_trainer, weights_of

from hookline.config import ConfigError
from hookline.engine import DefaultTrainer
from hookline.hooks import SWA


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


SETTINGS = {"start": 0.5}


def test_the_average_is_the_mean_of_the_snapshots_and_training_is_not_affected(make, tmp_path):
    def trained(trainer):
        trainer.register_hooks([weights := Weights()])
        trainer.train()
        return weights.seen

    expected = trained(make(folder="plain"))
    trainer = make(swa=SETTINGS)
    notes = trained(trainer)
    for ours, theirs in zip(notes, expected, strict=True):
        assert_same(ours, theirs)
    snapshots = [notes[i] for i in (20, 25, 30)]  # ends of epochs of 5 iterations, from iteration 15 on
    assert trainer.find_hook(SWA).updates == 3
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), sum(snapshot[name] for snapshot in snapshots) / 3)
        assert not torch.equal(parameter, notes[-1][name])
    checkpoint = load(tmp_path / "run")
    assert_same(checkpoint["model"], weights_of(trainer.model))
    assert_same(checkpoint["trainer"]["hooks"]["SWA"]["averaged_model"], weights_of(trainer.model))
    assert make(swa=SETTINGS, resume=True).evaluate() == trainer.evaluate()


@pytest.mark.parametrize("sampler", ["EpochSampler", "TrainingSampler"])
def test_batch_norm_statistics_are_those_of_a_pass_over_the_data(make, sampler):
    trainer = make("MODEL.ARGS.dropout", 0.0, "DATALOADER.SAMPLER_TRAIN", sampler, swa=SETTINGS)
    trainer.train()
    ours = weights_of(trainer.model)
    loader = DefaultTrainer.build_train_loader(trainer.cfg)
    update_bn_stats(trainer.model, (x for x, _ in loader), 5)  # batches of an epoch
    assert any("running" in name for name in ours)
    for name, value in trainer.model.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(ours[name], value)


def test_a_stopped_run_keeps_its_own_weights(make, tmp_path):
    trainer = make(swa=SETTINGS)
    trainer.register_hooks([weights := Weights(), at(21, lambda t: t.request_stop("now"))])
    trainer.train()
    assert torch.equal(load(tmp_path / "run")["model"]["classifier.bias"], weights.seen[-1]["classifier.bias"])


def test_invalid_arguments_and_batch_norms_without_data_are_errors_before_training():
    for arguments in ({"every": 0}, {"start": "1h"}):
        with pytest.raises(ConfigError, match=str(*arguments.values())):
            SWA(**arguments)
    with pytest.raises(ConfigError, match="data_loader"):
        make_trainer(SWA(), data=[1]).train(0, 1)


@pytest.mark.parametrize("arguments", [{"start": 50}, {"every": 20}])
def test_an_average_that_was_never_due_is_a_warning_at_the_end(log, arguments):
    make_trainer(SWA(**{"start": 0, "every": 1, **arguments}), model=Net(), data=[torch.ones(1, 2)] * 4).train(0, 10)
    assert "SWA: there is no average: it is due every" in log.text
