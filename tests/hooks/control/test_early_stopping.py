import pytest
import torch
from torch import nn

from hookline import Trainer
from hookline.config import ConfigError
from hookline.engine import TrainerBase
from hookline.hooks import EarlyStopping, EvalHook


class Losses(TrainerBase):
    """Puts the next of some losses in each step."""

    def __init__(self, losses, smoothing_hint=True):
        super().__init__()
        self.losses, self.smoothing_hint = losses, smoothing_hint

    def run_step(self):
        self.storage.put_scalar("total_loss", self.losses[self.iter], smoothing_hint=self.smoothing_hint)


def test_a_metric_of_training_is_read_every_period():
    trainer = Losses([5.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.0], smoothing_hint=False)
    trainer.register_hooks([EarlyStopping("total_loss", patience=2, mode="min", period=2)])
    result = trainer.train(0, 10)
    assert result.iteration == 8
    assert result.reason == "early stopping: total_loss has not been better than 3 for 2 periods"


def test_a_smoothed_metric_is_its_median():
    trainer = Losses([3.0] * 20 + [9.0, 1.0, 2.0, 2.0])
    stopping = EarlyStopping("total_loss", mode="min", period=8)
    trainer.register_hooks([stopping])
    trainer.train(0, 24)
    assert (stopping.best, stopping.count) == (3.0, 2)  # 2.0 and 9.0 do not count


def test_a_metric_of_training_without_a_period_is_an_error_that_says_so():
    trainer = Losses([1.0] * 4)
    trainer.register_hooks([EvalHook(1, lambda: {"val": {"a": 1}}), EarlyStopping("total_loss")])
    with pytest.raises(ConfigError, match=r"evaluation's metrics \(val/a\)\. For a metric of training, set"):
        trainer.train(0, 4)


@pytest.fixture
def make(tmp_path):
    def make(*hooks, resume=False, length="9ep", **options):
        trainer = Trainer(
            nn.Linear(2, 1),
            (torch.zeros(8, 2), torch.zeros(8, 1)),  # the loss is constant
            loss=nn.MSELoss(),
            length=length,
            batch_size=4,
            hooks=hooks,
            output_dir=tmp_path,
            seed=1,
            lr=0.0,
            config={"MODEL.DEVICE": "cpu", "LOG.WRITERS": [], "LOG.PROGRESS_BAR": False, **options.pop("config", {})},
            **options,
        )
        return trainer.train(resume=resume)

    return make


@pytest.mark.parametrize("tested", [False, True])
def test_a_metric_of_training_is_read_after_each_epoch(make, tested):
    data = (torch.zeros(8, 2), torch.zeros(8, 1)) if tested else None
    stopping = EarlyStopping("total_loss", patience=2)
    result = make(stopping, test_data=data, eval_period=1 if tested else None)
    assert (result.iteration, stopping.mode) == (6, "min")
    assert result.reason.endswith("for 2 epochs")


@pytest.mark.parametrize("metric", ["train/loss", "total_loss"])
def test_metrics_of_training_are_accepted_beside_those_of_evaluations(make, metric):
    data = (torch.zeros(8, 2), torch.zeros(8, 1))
    options = {"metrics": ["Loss"], "config": {"LOG.TRAIN_METRICS": ["Loss"]}}
    assert make({"NAME": "EarlyStopping", "ARGS": {"metric": metric}}, test_data=data, **options).iteration == 8


def test_the_metric_may_be_a_lambda_also_in_a_resume(make, tmp_path):
    data = (torch.zeros(8, 2), torch.zeros(8, 1))

    def run(length, **options):
        stopping = EarlyStopping(lambda metrics: -metrics["total_loss"], patience=4)
        return make(stopping, test_data=data, eval_period="1ep", length=length, **options)

    assert run("3ep").reason == "completed"
    assert run("9ep", resume=True).iteration == 10  # the evaluations before count
    assert "object hookline.hooks.control.early_stopping.EarlyStopping" in (tmp_path / "config.yaml").read_text()


def test_an_unknown_metric_is_an_error_after_the_first_period():
    trainer = Losses([1.0] * 4)
    trainer.register_hooks([EarlyStopping("total_los", period=2)])
    with pytest.raises(ConfigError, match=r"'total_los', which is not among the metrics so far.*'total_loss'"):
        trainer.train(0, 4)


def gap(metrics):
    return metrics["val/a"] - metrics["total_loss"]


@pytest.mark.parametrize("metric", [gap, f"{__name__}:gap"])
def test_the_metric_may_be_a_function_of_all_metrics(metric):
    trainer = Losses([3.0, 2.0, 2.0, 2.0, 2.0])
    stopping = EarlyStopping(metric, patience=2)
    trainer.register_hooks([EvalHook(1, lambda: {"val": {"a": 1}}), stopping])
    result = trainer.train(0, 5)
    assert result.iteration == 4
    assert result.reason.startswith(f"early stopping: {__name__}:gap has not been better than -1 for 2 evaluations")
    assert stopping.state_dict() == {"best": -1.0, "count": 2}


def evaluated(values, **arguments):
    trainer = Losses([1.0] * len(values))
    remaining = iter(values)
    stopping = EarlyStopping("val/a", **arguments)
    trainer.register_hooks([EvalHook(1, lambda: {"val": {"a": next(remaining)}}), stopping])
    return trainer.train(0, len(values)).iteration, stopping.best


def test_it_stops_after_so_many_evaluations_without_an_improvement():
    assert evaluated([1, 2, 2, float("nan"), 9], patience=2) == (4, 2)
    assert evaluated([3, 2, 2, 4, 9], patience=2, mode="min") == (4, 2)
    assert evaluated([1, 0, 2, 1, 3], patience=2) == (5, 3)


def test_a_smaller_change_than_min_delta_does_not_count():
    assert evaluated([1, 1.4, 1.5, 9], patience=2, min_delta=0.5) == (3, 1)
